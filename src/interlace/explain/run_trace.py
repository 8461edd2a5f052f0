"""What the ranks of one of our runs did, from the steps that it recorded."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from interlace import run_files
from interlace.errors import InputError
from interlace.explain.rank_trace import (
    Communicated,
    Computed,
    MarkedStep,
    Pass,
    RankTrace,
    StepPlace,
)
from interlace.ir import store
from interlace.ir.graph import COLLECTIVES, COMPUTE_LANE
from interlace.ir.timeline import BACKWARD, WAIT, Span, Timeline

MODES = ("1", "eager", "2")
"""Ways of running, the one that is explained first: what two strands could gain is asked of one."""
_DEGREES = {"tp": "tensor", "cp": "context"}
"""Lane -> key of [parallel] with the ranks that share it."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The recorded steps of a run."""

    directory: Path
    timelines: dict[str, dict[int, Timeline]]
    """By way of running, then by rank."""
    degrees: dict[str, int]
    """Lane -> ranks of its groups, where the run file says it."""

    def mode(self, wanted: str = "") -> str:
        """The way of running that is explained. Raises InputError if `wanted` was not recorded."""
        if wanted and wanted not in self.timelines:
            raise InputError(
                f"{self.directory} has no recorded step of mode {wanted!r}",
                hint=f"it has {', '.join(sorted(self.timelines))}",
            )
        known = [mode for mode in MODES if mode in self.timelines]
        return wanted or (known or sorted(self.timelines))[0]

    def traces(self, mode: str) -> list[RankTrace]:
        """One for each rank, in their order."""
        return [
            _trace(timeline, rank, f"{self.directory}, mode {mode}", self.degrees)
            for rank, timeline in sorted(self.timelines[mode].items())
        ]


def read_run(directory: Path) -> RecordedRun:
    """Read the folder of a run. Raises InputError if it is none or has no recorded step."""
    if not any((directory / name).is_file() for name in run_files.MARKERS):
        raise InputError(
            f"{directory} is not the folder of a run: it has none of "
            f"{', '.join(run_files.MARKERS)}",
            hint="give the output.directory of a run, or the trace files themselves",
        )
    files = run_files.timeline_files(directory)
    if not files:
        raise InputError(
            f"{directory} has no recorded steps",
            hint="run it with output.record_every = 1, or with compare.steps = 2",
        )
    found: dict[str, dict[int, Timeline]] = {}
    for path in files:
        mode = path.stem.rpartition("-rank")[0]
        found.setdefault(mode, {})[run_files.rank_of(path)] = store.load(path, Timeline)
    return RecordedRun(directory, found, _degrees(directory / run_files.RUN))


def _degrees(path: Path) -> dict[str, int]:
    if not path.is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("parallel", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"cannot read {path}: {error}", hint="repeat the run") from error
    return {lane: table[key] for lane, key in _DEGREES.items() if isinstance(table.get(key), int)}


def _trace(timeline: Timeline, rank: int, source: str, degrees: dict[str, int]) -> RankTrace:
    """The compute lane without its waits and without the calls that issue collectives; link lanes
    as they are."""
    computed = [
        Computed(
            f"{span.kind} {span.name}", span.start_ns, span.end_ns, span.start_ns, _place(span)
        )
        for span in timeline.spans
        if span.lane == COMPUTE_LANE and span.kind != WAIT and span.kind not in COLLECTIVES
    ]
    communicated = [
        Communicated(
            kind=span.kind,
            group=span.lane,
            ranks=(),
            group_size=degrees.get(span.lane, 0),
            bytes=span.bytes,
            lane=span.lane,
            start_ns=span.start_ns,
            end_ns=span.end_ns,
            launched_ns=span.issue_ns,
            place=_place(span),
        )
        for span in timeline.collectives
    ]
    return RankTrace(
        rank=rank,
        source=source,
        device="run",
        steps=(MarkedStep(f"recorded step, mode {timeline.label}", 0, timeline.length_ns),),
        computed=tuple(sorted(computed, key=lambda each: (each.start_ns, each.end_ns))),
        communicated=tuple(sorted(communicated, key=lambda each: (each.start_ns, each.end_ns))),
    )


def _place(span: Span) -> StepPlace:
    if not span.strand:
        return StepPlace(0, Pass.END)
    part = Pass.BACKWARD if span.strand == BACKWARD else Pass.FORWARD
    return StepPlace(0, part, max(1, span.micro_batch))
