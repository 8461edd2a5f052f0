"""A pipeline searched for an uneven model, against interleaved 1F1B with equal layers.

Four ranks run a GPT with 1/32 of the widths of a larger model and of its vocabulary of 128,256
words, so that blocks and head have the ratios of the full model: of 3B, 32 blocks and a head that
takes as long as three and a half of them, and of 1B, 16 blocks and a head as long as five. Every
sixth block has an MLP of twice the width. Compute is emulated: each matmul sleeps for its FLOPs at
a given rate, as there are fewer cores than ranks; everything else is real, transfers over gloo and
the runtimes above all. The search gets the times of a recorded step, may cut blocks between their
attention and their MLP, and has as much memory as interleaved 1F1B takes. All ways take turns step
by step in one run, and their gradients are compared before, without emulation.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from interlace.bench.results import (
    ResultRow,
    environment,
    predicted_over_measured,
    speedup,
    write_json,
)
from interlace.bench.searched_model import (
    UnevenSize,
    measured,
    measuring_starts,
    whole_blocks,
)
from interlace.ir.actions import Action
from interlace.ranks.launch import launch
from interlace.report.searched_build import usual_of
from interlace.schedules.finder import find
from interlace.schedules.schedule_text import write_schedule
from interlace.search.pipelines.fixed_orders import BALANCED, FixedPipeline, fixed_pipelines
from interlace.search.pipelines.model_units import ModelUnit, PipelineProblem
from interlace.search.pipelines.pipeline_search import SearchedPipeline, search_pipeline
from interlace.text import milliseconds

RANKS = 4
"""Of the pipeline."""
EMULATED = "emulated compute"
"""What cases are called in which matmuls sleep."""
_MICRO_BATCHES = (8, 16)
"""Of a step."""
_MOST_CHUNKS, _TRIES = 3, 20_000
"""Of the search, more of both than by default: some 55 s for a case of 3B on one core."""
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "3B": {"width": 96, "blocks": 32, "flops_per_s": 2.5e8},
    "1B": {"width": 64, "blocks": 16, "flops_per_s": 2e8},
}
"""Widths are those of Llama 3.2 by 32. At twice the rate of 3B, what is not emulated, Python and
four ranks on two cores, took 10 to 15 % of its steps, where a step of the full model has little of
the kind."""
StepTimes = Mapping[str, Mapping[str, list[Any]]]
"""By way: `times`, ns of each step; of our ways `measured`, ns of steps that were recorded,
`predicted`, as the simulator has them, and `passes` of each chunk."""
_SEARCHED, _USUAL, _BEST, _TORCH = "searched", "interleaved", "best fixed", "torch interleaved"
"""Ways of running a step."""
_MEASURED = "zb_v"
"""The schedule of the step from which times of units come: it has all passes apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedCase:
    """Pipelines of one model."""

    searched: SearchedPipeline
    """With no more memory on a rank than interleaved 1F1B takes."""
    usual: FixedPipeline
    """Interleaved 1F1B with equal layers."""
    blocks: Sequence[ModelUnit]
    """The units that are its layers."""

    @property
    def best(self) -> FixedPipeline:
        """The fastest schedule of the package with balanced work, by simulation, whatever memory it
        takes."""
        return next(each for each in self.searched.fixed if each.cut == BALANCED)


def run(*, quick: bool, json_path: Path | None) -> int:
    """Measure, print the table; write JSON if asked."""
    from interlace.report.tables import bench_table  # noqa: PLC0415  rich

    quickly = UnevenSize(flops_per_s=2.8e9, repeats=2, micro_batches=4, blocks=16)
    rows: list[ResultRow] = []
    for sizes in [[quickly]] if quick else _sizes():
        units = measured_units(sizes[0])
        for size in sizes:
            compared = compare(size, units)
            found, usual = compared.searched, compared.usual
            print(
                f"{_case(size)}: matmuls sleep for their FLOPs at "
                f"{size.flops_per_s:.2g} FLOP/s; by simulation {milliseconds(found.step.step_ns)} "
                f"ms, {usual.schedule} with equal layers {milliseconds(usual.length_ns)} ms, no "
                f"pipeline of these units less than {milliseconds(found.floor_ns)} ms",
                file=sys.stderr,
            )
            rows += rows_of(size, compared, measure(size, compared))
    print(bench_table([asdict(row) for row in rows]))
    if json_path is not None:
        link = f"this machine's own link; {EMULATED}: matmuls sleep for their FLOPs"
        write_json(json_path, "searched", environment(link), rows)
        print(json_path)
    return 0


def _sizes() -> Iterator[Sequence[UnevenSize]]:
    """By model."""
    for name, given in _MODELS.items():
        yield [UnevenSize(model=name, micro_batches=n, **given) for n in _MICRO_BATCHES]


def _case(size: UnevenSize) -> str:
    return f"{size.model}, {size.micro_batches} micro-batches, {EMULATED}"


def measured_units(size: UnevenSize) -> tuple[ModelUnit, ...]:
    """The units with the times of a recorded step. RunError when a rank fails."""
    units, chunks = size.units(), 2 * RANKS
    starts = measuring_starts(units, chunks)
    actions = find(_MEASURED).of_ranks(RANKS, size.micro_batches, 2)
    found = _run(replace(size, repeats=1), units, {_MEASURED: (actions, starts)}, {})
    return measured(units, found["passes"][_MEASURED])


def compare(size: UnevenSize, units: tuple[ModelUnit, ...]) -> SearchedCase:
    """The pipeline for this model, and interleaved 1F1B, which takes whole blocks."""
    blocks = PipelineProblem(
        units=whole_blocks(units), ranks=RANKS, micro_batches=size.micro_batches
    )
    usual = usual_of(fixed_pipelines(blocks))
    problem = replace(blocks, units=units, memory_bytes=usual.peak_bytes, most_chunks=_MOST_CHUNKS)
    found = search_pipeline(problem, tries=_TRIES)
    return SearchedCase(searched=found, usual=usual, blocks=blocks.units)


def measure(size: UnevenSize, compared: SearchedCase) -> StepTimes:
    """What the ranks found. RunError when one fails."""
    found, usual, best = compared.searched, compared.usual, compared.best
    units = found.problem.units
    places = {unit.name: place for place, unit in enumerate(units)}
    firsts = usual.layout.split_at(compared.blocks)
    ways = {
        _SEARCHED: (found.actions, found.layout.starts),
        _USUAL: (usual.actions, (0, *(places[name] for name in firsts))),
        _BEST: (best.actions, best.layout.starts),
    }
    return _run(size, units, ways, {_TORCH: _USUAL})


def _run(
    size: UnevenSize,
    units: Sequence[ModelUnit],
    ways: Mapping[str, tuple[Sequence[Sequence[Action]], Sequence[int]]],
    rival: Mapping[str, str],
) -> StepTimes:
    """Steps of each way, which is its actions, and the units with which its chunks begin; and of
    PyTorch's runtime with the chunks of one of these ways."""
    with tempfile.TemporaryDirectory(prefix="interlace-searched-") as folder:
        told, result = Path(folder) / "job.json", Path(folder) / "times.json"
        given: dict[str, Any] = {}
        for name, (actions, starts) in ways.items():
            file = Path(folder) / f"{name.replace(' ', '-')}.txt"
            split = [units[start].name for start in starts[1:]]
            file.write_text(write_schedule(actions, split), encoding="utf-8")
            given[name] = {"schedule": str(file), "starts": starts}
        job = {"size": asdict(size), "ways": given, "rival": rival}
        told.write_text(json.dumps(job), encoding="utf-8")
        rank = ["-m", "interlace.bench.searched_world", str(told), str(result)]
        launch([sys.executable, *rank], ranks=RANKS)
        times: StepTimes = json.loads(result.read_text(encoding="utf-8"))
        return times


def rows_of(size: UnevenSize, compared: SearchedCase, times: StepTimes) -> list[ResultRow]:
    """The searched pipeline against each other way; each against the simulator, which knows the
    times of a recorded step; and against what the search knew, the times of another one."""
    ms = {name: [each / 1e6 for each in own] for name, own in times["times"].items()}
    case = f"searched, {RANKS} ranks, {_case(size)}"
    best = compared.best
    rows = [
        speedup(case, "speedup_vs_interleaved", ms[_SEARCHED], ms[_USUAL]),
        speedup(case, "speedup_vs_pytorch_interleaved", ms[_SEARCHED], ms[_TORCH]),
        speedup(case, f"speedup_vs_balanced_{best.schedule}", ms[_SEARCHED], ms[_BEST]),
    ]
    for name, ns in (
        (_SEARCHED, compared.searched.step.step_ns),
        (_USUAL, compared.usual.length_ns),
        (_BEST, best.length_ns),
    ):
        named = f"{best.schedule if name == _BEST else name}, {_case(size)}"
        predicted, measured_ms = (
            [each / 1e6 for each in times[key][name]] for key in ("predicted", "measured")
        )
        rows.append(predicted_over_measured(named, predicted, measured_ms))
        known = predicted_over_measured(named, [ns / 1e6] * len(ms[name]), ms[name])
        rows.append(replace(known, metric="searched_over_measured"))
    return rows
