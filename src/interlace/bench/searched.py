"""A pipeline searched for an uneven model, against interleaved 1F1B with equal layers.

Four ranks run a GPT with 1/32 of the widths of a larger model and of its vocabulary of 128,256
words, so that blocks and head have the ratios of the full model: of 3B, 32 blocks and a head that
takes as long as three and a half of them, and of 1B, 16 blocks and a head as long as five. Every
sixth block has an MLP of twice the width. Compute is emulated: each matmul sleeps for its FLOPs at
a given rate, as there are fewer cores than ranks; everything else is real, transfers over gloo and
the runtimes above all. The search gets the same FLOPs and rate, and as much memory as interleaved
1F1B takes. All ways take turns step by step in one run, and their gradients are compared before,
without emulation.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
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
from interlace.ranks.launch import launch
from interlace.report.searched_build import usual_of
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
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "3B": {"width": 96, "blocks": 32, "flops_per_s": 5e8},
    "1B": {"width": 64, "blocks": 16, "flops_per_s": 2e8},
}
"""Widths are those of Llama 3.2 by 32. Steps of each take about 10 s, in which what is not emulated
takes little."""
_BOUNDARY_NS = 300_000
"""Time of a message of some KB over gloo and loopback, about; a choice."""
StepTimes = Mapping[str, Mapping[str, list[int]]]
"""By way: `times`, ns of each step; of our ways `measured`, ns of steps that were recorded, and
`predicted`, as the simulator has them."""
_SEARCHED, _USUAL, _BEST, _TORCH = "searched", "interleaved", "best fixed", "torch interleaved"
"""Ways of running a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenSize:
    """The model and the step."""

    model: str = "3B"
    """Whose ratios these are."""
    width: int = 96
    heads: int = 4
    blocks: int = 32
    words: int = 4008
    tokens: int = 64
    """Of a micro-batch."""
    micro_batches: int = 8
    flops_per_s: float = 5e8
    """Of emulated compute."""
    repeats: int = 3

    def mlp(self, block: int) -> int:
        """The width of the MLP of a block."""
        return (8 if block % 6 == 5 else 4) * self.width

    def units(self) -> tuple[ModelUnit, ...]:
        """What passes take when compute is emulated: three times as many FLOPs as the forward, a
        third each. Attention's own FLOPs are too few to count with so few tokens."""
        units = [self._unit("words", 0, self.words * self.width, 0)]
        for block in range(self.blocks):
            weights = self.width * (4 * self.width + 2 * self.mlp(block))
            saved = 10 * self.width + 2 * self.mlp(block)
            units.append(self._unit(f"blocks.{block}", weights, weights, saved))
        head = self.width * self.words
        units.append(self._unit("head", head, head, self.words + self.width))
        return tuple(units)

    def _unit(self, name: str, matmul_weights: int, weights: int, saved: int) -> ModelUnit:
        """`saved` in values a token; what is held: a weight and its gradient, all in float32."""
        ns = round(2 * self.tokens * matmul_weights / self.flops_per_s * 1e9)
        return ModelUnit(
            name=name, forward_ns=ns, input_ns=ns, weight_ns=ns, boundary_ns=_BOUNDARY_NS,
            saved_bytes=4 * self.tokens * saved, kept_bytes=4 * self.tokens * saved,
            held_bytes=8 * weights,
        )  # fmt: skip


def run(*, quick: bool, json_path: Path | None) -> int:
    """Measure, print the table; write JSON if asked."""
    from interlace.report.tables import bench_table  # noqa: PLC0415  rich

    quickly = UnevenSize(flops_per_s=2.8e9, repeats=2, micro_batches=4, blocks=16)
    sizes = [quickly] if quick else list(_sizes())
    rows: list[ResultRow] = []
    for size in sizes:
        found = searched_for(size)
        usual = usual_of(found.fixed)
        print(
            f"{_case(size)}: matmuls sleep for their FLOPs at "
            f"{size.flops_per_s:.2g} FLOP/s; by simulation {milliseconds(found.step.step_ns)} ms, "
            f"{usual.schedule} with equal layers {milliseconds(usual.length_ns)} ms, "
            f"no pipeline of these units less than {milliseconds(found.floor_ns)} ms",
            file=sys.stderr,
        )
        rows += rows_of(size, found, measure(size, found))
    print(bench_table([asdict(row) for row in rows]))
    if json_path is not None:
        link = f"this machine's own link; {EMULATED}: matmuls sleep for their FLOPs"
        write_json(json_path, "searched", environment(link), rows)
        print(json_path)
    return 0


def _sizes() -> Iterator[UnevenSize]:
    for name, given in _MODELS.items():
        for count in _MICRO_BATCHES:
            yield UnevenSize(model=name, micro_batches=count, **given)


def _case(size: UnevenSize) -> str:
    return f"{size.model}, {size.micro_batches} micro-batches, {EMULATED}"


def searched_for(size: UnevenSize) -> SearchedPipeline:
    """The pipeline for this model, with no more memory on a rank than interleaved 1F1B takes."""
    problem = PipelineProblem(units=size.units(), ranks=RANKS, micro_batches=size.micro_batches)
    limit = usual_of(fixed_pipelines(problem)).peak_bytes
    return search_pipeline(replace(problem, memory_bytes=limit))


def best_fixed(found: SearchedPipeline) -> FixedPipeline:
    """The fastest schedule of the package with balanced work, by simulation, whatever memory it
    takes."""
    return next(each for each in found.fixed if each.cut == BALANCED)


def measure(size: UnevenSize, found: SearchedPipeline) -> StepTimes:
    """What the ranks found. RunError when one fails."""
    usual, best = usual_of(found.fixed), best_fixed(found)
    with tempfile.TemporaryDirectory(prefix="interlace-searched-") as folder:
        told, result = Path(folder) / "job.json", Path(folder) / "times.json"
        ways: dict[str, Any] = {}
        for name, actions, layout in (
            (_SEARCHED, found.actions, found.layout),
            (_USUAL, usual.actions, usual.layout),
            (_BEST, best.actions, best.layout),
        ):
            file = Path(folder) / f"{name.replace(' ', '-')}.txt"
            split = layout.split_at(found.problem.units)
            file.write_text(write_schedule(actions, split), encoding="utf-8")
            ways[name] = {"schedule": str(file), "starts": layout.starts}
        job = {"size": asdict(size), "ways": ways, "rival": {_TORCH: _USUAL}}
        told.write_text(json.dumps(job), encoding="utf-8")
        rank = ["-m", "interlace.bench.searched_world", str(told), str(result)]
        launch([sys.executable, *rank], ranks=RANKS)
        times: StepTimes = json.loads(result.read_text(encoding="utf-8"))
        return times


def rows_of(size: UnevenSize, found: SearchedPipeline, times: StepTimes) -> list[ResultRow]:
    """The searched pipeline against each other way; each against the simulator, which knows the
    times of a recorded step; and against what the search knew, which is FLOPs of matmuls."""
    ms = {name: [each / 1e6 for each in own] for name, own in times["times"].items()}
    case = f"searched, {RANKS} ranks, {_case(size)}"
    best = best_fixed(found)
    rows = [
        speedup(case, "speedup_vs_interleaved", ms[_SEARCHED], ms[_USUAL]),
        speedup(case, "speedup_vs_pytorch_interleaved", ms[_SEARCHED], ms[_TORCH]),
        speedup(case, f"speedup_vs_balanced_{best.schedule}", ms[_SEARCHED], ms[_BEST]),
    ]
    for name, ns in (
        (_SEARCHED, found.step.step_ns),
        (_USUAL, usual_of(found.fixed).length_ns),
        (_BEST, best.length_ns),
    ):
        named = f"{best.schedule if name == _BEST else name}, {_case(size)}"
        predicted, measured = (
            [each / 1e6 for each in times[key][name]] for key in ("predicted", "measured")
        )
        rows.append(predicted_over_measured(named, predicted, measured))
        known = predicted_over_measured(named, [ns / 1e6] * len(ms[name]), ms[name])
        rows.append(replace(known, metric="searched_over_measured"))
    return rows
