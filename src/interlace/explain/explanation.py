"""`explain`: from traces or the folder of a run to figures, bounds, a simulation and advice."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from interlace.errors import InputError
from interlace.explain.advice import Advice, advise
from interlace.explain.exposure import Exposure, KindRow, exposure, kind_rows
from interlace.explain.gain import Gains, gains
from interlace.explain.kineto_trace import rank_trace, sorted_by_rank
from interlace.explain.rank_trace import RankTrace
from interlace.explain.run_trace import RecordedRun, read_run
from interlace.explain.step_choice import StepChoice
from interlace.explain.waiting import Ranks, busiest, compare_ranks

_SUFFIXES = (".json", ".json.gz")
"""Names of trace files in a folder."""


@dataclass(frozen=True, slots=True)
class OtherWay:
    """Another way of running that the run recorded."""

    mode: str
    step_ns: int
    exposure: Exposure


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that is said of a job."""

    sources: tuple[str, ...]
    device: str
    steps: tuple[str, ...]
    left_out: str
    rank: int
    """The one of which rows and gains are: it computes longest."""
    step_ns: int
    """Median of its marked steps."""
    figures: Exposure
    rows: tuple[KindRow, ...]
    ranks: Ranks
    gains: Gains | None
    """None if there is no communication."""
    advice: Advice
    other_ways: tuple[OtherWay, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON has it; times are integer nanoseconds."""
        table = asdict(self)
        table["figures"] |= _derived(self.figures)
        for way, own in zip(table["other_ways"], self.other_ways, strict=True):
            way["exposure"] |= _derived(own.exposure)
        table["ranks"]["waiting_share"] = self.ranks.waiting_share
        return table


def explain(
    sources: Sequence[Path],
    choice: StepChoice | None = None,
    *,
    micro_batches: int = 0,
    mode: str = "",
) -> Explanation:
    """Explain the folder of a run, trace files, or a folder of trace files.

    `micro_batches` is the number of the step that is considered, 0 for that of the trace, or 4 if
    it has one. `mode` is a way of running that a run recorded. Raises InputError for what cannot be
    read, has no step or no work in it, and for arguments that do not fit.
    """
    if not sources:
        raise InputError("nothing to explain", hint="give a run's folder, or trace files")
    if not 0 <= micro_batches <= 10_000:
        raise InputError(
            f"{micro_batches} micro-batches", hint="a number from 1 up, 0 for the trace's"
        )
    choice = choice or StepChoice()
    run = as_run(sources)
    if run is not None:
        if choice != StepChoice():
            raise InputError(
                f"{sources[0]} is a run, which records one step",
                hint="--steps, --mark and --between are for traces",
            )
        chosen = run.mode(mode)
        others = tuple(_other(run, each) for each in sorted(run.timelines) if each != chosen)
        return _explained(run.traces(chosen), micro_batches, others)
    if mode:
        raise InputError(
            f"mode {mode!r} is a way of running of our own runs", hint="traces have none"
        )
    files = _files(sources)
    traces = sorted_by_rank([rank_trace(path, choice, i) for i, path in enumerate(files)])
    return _explained(traces, micro_batches, ())


def as_run(sources: Sequence[Path]) -> RecordedRun | None:
    """The run, if the only source is the folder of one. Raises InputError for a source that is not
    there."""
    for source in sources:
        if not source.exists():
            raise InputError(
                f"there is no file or folder {source}",
                hint="give the output.directory of a run, or traces of torch.profiler",
            )
    if len(sources) == 1 and sources[0].is_dir() and not _traces_in(sources[0]):
        return read_run(sources[0])
    if len(sources) == 1 and sources[0].is_dir() and (sources[0] / "timelines").is_dir():
        return read_run(sources[0])
    return None


def _explained(
    traces: Sequence[RankTrace], micro_batches: int, others: tuple[OtherWay, ...]
) -> Explanation:
    for trace in traces:
        if not trace.computed and not trace.communicated:
            raise InputError(
                f"{trace.source}: the chosen steps have no kernels and no operators",
                hint="choose others with --steps, or record a trace with more than one step",
            )
    chosen = busiest(traces)
    figures, ranks = exposure(chosen), compare_ranks(traces)
    found = gains(chosen, micro_batches) if chosen.communicated else None
    return Explanation(
        sources=tuple(trace.source for trace in traces),
        device=chosen.device,
        steps=tuple(step.name for step in chosen.steps),
        left_out=chosen.left_out,
        rank=chosen.rank,
        step_ns=next(row.step_ns for row in ranks.rows if row.rank == chosen.rank),
        figures=figures,
        rows=kind_rows(chosen),
        ranks=ranks,
        gains=found,
        advice=advise(figures, found, ranks),
        other_ways=others,
    )


def _other(run: RecordedRun, mode: str) -> OtherWay:
    trace = busiest(run.traces(mode))
    return OtherWay(mode, trace.steps[0].duration_ns, exposure(trace))


def _files(sources: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        inside = _traces_in(source) if source.is_dir() else [source]
        if not inside:
            raise InputError(
                f"{source} has no traces (.json or .json.gz)",
                hint="give files of torch.profiler, or one folder of a run by itself",
            )
        found += inside
    return found


def _traces_in(folder: Path) -> list[Path]:
    """Files of a folder that look like traces; what a run writes has other names."""
    return sorted(
        path
        for path in folder.iterdir()
        if (path.name.endswith(_SUFFIXES) and "rank" in path.name.lower()) or _is_torch_name(path)
    )


def _is_torch_name(path: Path) -> bool:
    """Names that `tensorboard_trace_handler` gives."""
    return path.name.endswith((".pt.trace.json", ".pt.trace.json.gz"))


def _derived(figures: Exposure) -> dict[str, Any]:
    return {
        "exposed_ns": figures.exposed_ns,
        "idle_ns": figures.idle_ns,
        "hidden_fraction": figures.hidden_fraction,
    }
