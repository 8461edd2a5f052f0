"""Two strands on one device as a rank of an imagined cluster: real kernels, modelled collectives.

Four runs of the same steps take turns: eager, one strand and two strands with the cluster's
collective times, and two strands whose collectives take no time, which is the most that hiding
can reach. Llama layers of the width of a published model, split over `world` ranks by tensor and
sequence parallelism; this process is rank 0. MFU is that of the graphs of a step, without gradient
clipping and optimizer. Every token lies in this rank's rows of the vocabulary, so that activations
are not zero, on which a GPU runs faster than on data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from interlace.bench.results import ResultRow, environment, speedup, write_json
from interlace.config import (
    CompareConfig,
    Mode,
    ModelConfig,
    ParallelConfig,
    PlanConfig,
    RunConfig,
    TrainConfig,
)
from interlace.errors import InputError, RunError, nearest
from interlace.graphs.torch_private import compile_elementwise
from interlace.hardware.cluster import load_cluster
from interlace.hardware.devices import peak_flops
from interlace.ir.timeline import Timeline
from interlace.lab.imagined_world import ImaginedWorld, imagined_world
from interlace.ranks.device import device_type
from interlace.runtime.executor import Batch
from interlace.step import Step
from interlace.train.compare import compare
from interlace.train.metrics import model_flops_per_token
from interlace.train.opening import open_session
from interlace.train.rank_job import job_of_rank
from interlace.train.step_runners import StepRunner

MODELS = {
    "small": ModelConfig(width=512, heads=8, kv_heads=8, ffn_width=1408),
    "8b": ModelConfig(width=4096, heads=32, kv_heads=8, ffn_width=14336),
    "39b": ModelConfig(width=8192, heads=64, kv_heads=64, ffn_width=28672),
    "70b": ModelConfig(width=8192, heads=64, kv_heads=8, ffn_width=28672),
}
"""Layers of Llama 8B and 70B, and of the 39B of DHelix (arXiv 2411.15871)."""

ROWS_PER_RANK = 512
"""Vocabulary rows of each rank; byte tokens are below 260, so all are rank 0's."""

SLOWER_ON_CPU = 25.0
"""A core is slower than a GPU by more than its `small` layers are smaller; links this much slower
bring communication near compute again."""

FREE = cast("Mode", "free")
"""Two strands whose collectives take no time."""


class FreeTransfers:
    """A runner whose collectives take no time on their links."""

    def __init__(self, runner: StepRunner, world: ImaginedWorld) -> None:
        self.number = 0
        self.runner = runner
        self.world = world
        self.losses: list[Tensor] = []
        self.results: Sequence[tuple[Tensor, ...]] = ()

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """As the runner's."""
        with self.world.free_transfers():
            loss = self.runner(batches)
        self.losses, self.results = self.runner.losses, self.runner.results
        return loss

    def record(self, batches: Sequence[Batch], label: str) -> Timeline | None:
        """As the runner's."""
        with self.world.free_transfers():
            return self.runner.record(batches, label=label)


@dataclass(frozen=True, kw_only=True)
class ImaginedCase:
    """What is run."""

    cluster: str
    world: int
    model: str
    layers: int
    slower: float
    steps: int
    captured: bool = False
    """Whether steps of strands are CUDA graphs; eager steps never are."""

    @property
    def name(self) -> str:
        """Label of the rows."""
        how = ", captured" if self.captured else ""
        return f"{self.model} x {self.layers} layers, {self.cluster}, world {self.world}{how}"


def configuration(case: ImaginedCase, *, on_gpu: bool) -> RunConfig:
    """The run that is compared."""
    if case.model not in MODELS:
        raise InputError(f"there is no model {case.model!r}", hint=nearest(case.model, MODELS))
    shape = MODELS[case.model]
    if case.layers < 1:
        raise InputError(
            f"--layers {case.layers} leaves no model", hint="set --layers to 1 or more"
        )
    if case.world < 2 or shape.kv_heads % case.world:
        raise InputError(
            f"--world {case.world} cannot share the {shape.kv_heads} key-value heads of "
            f"model {case.model}",
            hint=f"set --world to 2 or more, and to a divisor of {shape.kv_heads}",
        )
    model = replace(shape, layers=case.layers, vocab_size=ROWS_PER_RANK * case.world)
    base = RunConfig()
    return replace(
        base,
        model=model,
        parallel=ParallelConfig(tensor=case.world),
        data=replace(base.data, sequence_length=4096 if on_gpu else 256),
        train=TrainConfig(
            micro_batches=8,
            micro_batch_size=1,
            dtype="bfloat16" if on_gpu else "float32",
            steps=1,
            cuda_graph=case.captured,
        ),
        plan=PlanConfig(cache=False, profile_repeats=3),
        compare=CompareConfig(steps=case.steps, memory=True),
    )


def measure(case: ImaginedCase) -> tuple[list[ResultRow], str]:
    """(rows, label of the world). Needs no second process."""
    on_gpu = device_type() == "cuda"
    config = configuration(case, on_gpu=on_gpu)
    cluster = load_cluster(case.cluster)
    with imagined_world(
        cluster, case.world, slower=case.slower, compile_kernel=compile_elementwise
    ) as world:
        session = open_session(job_of_rank(config))
        free = FreeTransfers(_own_capture(session.runners["2"]), world)
        runners = {**session.runners, FREE: free}
        modes = (*config.compare.modes, FREE)
        config = replace(config, compare=replace(config.compare, modes=modes))
        session = replace(session, runners=runners, job=replace(session.job, config=config))
        source = session.dataset.batches(config.train.micro_batch_size)
        steps = [
            [session.move(next(source)) for _ in range(config.train.micro_batches)]
            for _ in range(case.steps)
        ]
        summary, _ = compare(session, steps, lambda _: None)
        label = world.label
    if not (summary["losses_identical"] and summary["weights_identical"]):
        raise RunError("one strand and two strands gave different bits in the imagined world")
    rows = rows_of(case.name, summary, _step_flops(config), _peak(config, on_gpu=on_gpu))
    if case.captured:  # a replay allocates nothing: its memory was taken by the capture
        rows = [row for row in rows if row.metric != "extra_memory_fraction"]
    return rows, label


def _own_capture(runner: StepRunner) -> StepRunner:
    """The same step, with CUDA graphs of its own if it has any: a captured collective takes the
    time that it took when it was captured."""
    if not isinstance(runner, Step) or runner.captured_in is None:
        return runner
    return Step(
        runner.strands, runner.plan, runner.tensors, costs=runner.costs,
        captured_in=runner.captured_in,
    )  # fmt: skip


def _step_flops(config: RunConfig) -> float:
    """This rank's share of the model's FLOPs in one step."""
    per_token = model_flops_per_token(
        config.model, config.model.vocab_size, config.data.sequence_length
    )
    assert per_token is not None  # the bench trains our own Llama
    tokens = config.data.sequence_length * config.train.micro_batch_size
    return per_token * tokens * config.train.micro_batches / config.parallel.ranks


def _peak(config: RunConfig, *, on_gpu: bool) -> float | None:
    return peak_flops(torch.cuda.get_device_name(), config.train.dtype) if on_gpu else None


def rows_of(
    case: str, summary: Mapping[str, Any], step_flops: float, peak: float | None
) -> list[ResultRow]:
    """The rows of one case; the first step of each way warms up and does not count."""
    modes = summary["modes"]
    two, one, eager, free = (modes[name] for name in ("2", "1", "eager", FREE))

    def single(metric: str, ours: float, baseline: float) -> ResultRow:
        ratio = ours / baseline if baseline else None
        return ResultRow(
            case=case, metric=metric, ours=ours, baseline=baseline, ratio=ratio, spread=None
        )

    rows = [
        speedup(case, "speedup_vs_eager", two["step_ms"][1:], eager["step_ms"][1:]),
        speedup(case, "speedup_vs_one_strand", two["step_ms"][1:], one["step_ms"][1:]),
        # Equal FLOPs, so the ratio of MFUs is that of times, inverted.
        speedup(case, "mfu_vs_no_communication", two["graph_ms"][1:], free["graph_ms"][1:]),
        single("hidden_fraction", two["hidden_fraction"], eager["hidden_fraction"]),
        single("overlap_effectiveness", _effectiveness(two), _effectiveness(eager)),
        single("communication_over_compute", one["communication_ms"], one["compute_ms"]),
        single("predicted_over_measured", two["predicted_ms"], median(two["graph_ms"][1:])),
    ]
    if peak is not None:
        mfu = [step_flops / peak / (median(m["graph_ms"][1:]) / 1e3) for m in (two, eager)]
        rows.append(single("mfu", *mfu))
    if one["allocated_bytes"] is not None:
        whole = [m["allocated_bytes"] + summary["constant_bytes"] for m in (two, one)]
        extra = replace(single("extra_memory_fraction", *whole), ratio=whole[0] / whole[1] - 1)
        rows.append(extra)
    return rows


def _effectiveness(mode: Mapping[str, float]) -> float:
    """(compute + communication - both together) / the shorter, over a step: 1 is perfect."""
    shorter = min(mode["compute_ms"], mode["communication_ms"])
    return (mode["communication_ms"] - mode["exposed_ms"]) / shorter if shorter else 0.0


def preset_for(gpu: str) -> str:
    """The cluster whose links were made for a GPU of that name; `a800` if none was."""
    words = gpu.lower().replace("-", " ").split()
    return next((name for name in ("h200", "h100", "a40") if name in words), "a800")


def write(path: str) -> None:
    """Measure 8B, 39B and 70B width in full and write JSON; used where only torch is installed."""
    rows, labels = [], set()
    cluster = preset_for(torch.cuda.get_device_name())
    for model, captured in (("8b", False), ("8b", True), ("39b", True), ("70b", True)):
        case = ImaginedCase(
            cluster=cluster, world=8, model=model, layers=2, slower=1.0, steps=6, captured=captured
        )
        found, label = measure(case)
        rows += found
        labels.add(label)
    write_json(Path(path), "imagined", environment(" and ".join(sorted(labels))), rows)


def _is_yes(word: str, *, usual: bool) -> bool:
    if word not in ("", "yes", "no"):
        raise InputError(f"--captured {word} is neither yes nor no", hint="say yes or no")
    return word == "yes" if word else usual


def run(
    *,
    quick: bool,
    json_path: Path | None,
    cluster: str = "a800",
    world: int = 8,
    model: str = "",
    layers: int = 2,
    slower: float = 0.0,
    captured: str = "",
) -> int:
    """Measure one case, print the table, write JSON if asked. An empty `model`, a `slower` of 0 and
    an empty `captured` (`yes` or `no`: steps as CUDA graphs) take what suits the device."""
    from interlace.report.tables import bench_table  # noqa: PLC0415  not where only torch is

    on_gpu = device_type() == "cuda"
    case = ImaginedCase(
        cluster=cluster,
        world=world,
        model=model or ("8b" if on_gpu else "small"),
        layers=layers,
        slower=slower or (1.0 if on_gpu else SLOWER_ON_CPU),
        steps=3 if quick else 6,
        captured=_is_yes(captured, usual=on_gpu),
    )
    rows, label = measure(case)
    print(label)
    print(bench_table([asdict(row) for row in rows]))
    if json_path is not None:
        write_json(json_path, "imagined", environment(label), rows)
        print(json_path)
    return 0
