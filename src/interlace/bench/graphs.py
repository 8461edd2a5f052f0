"""Traced graphs against eager PyTorch on one device, with no communication at all.

What does it cost, or gain, to run a step as lowered graphs? One rank, so nothing can be hidden:
speed-ups here come from the absence of the autograd engine and of DTensor dispatch. On a GPU
the model has the width of Llama 8B and computes in bfloat16.
"""

from dataclasses import asdict, replace
from pathlib import Path

import torch

from interlace.bench.results import ResultRow, environment, speedup, write_json
from interlace.config import CompareConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from interlace.ranks.process_group import process_group
from interlace.train.compare import compare
from interlace.train.opening import open_session
from interlace.train.rank_job import job_of_rank


def configuration(*, quick: bool, on_gpu: bool, captured: bool = False) -> RunConfig:
    """The run that is compared; `captured` makes steps of strands CUDA graphs."""
    base = RunConfig(compare=CompareConfig(steps=3 if quick else 8), plan=PlanConfig(cache=False))
    if on_gpu:
        model = ModelConfig(
            layers=2 if quick else 4, width=4096, heads=32, kv_heads=8, ffn_width=14336
        )
        train = TrainConfig(
            micro_batches=4, micro_batch_size=1, dtype="bfloat16", steps=1, cuda_graph=captured
        )
        return replace(
            base, model=model, train=train, data=replace(base.data, sequence_length=4096)
        )
    model = ModelConfig(layers=1 if quick else 2, width=512, heads=8, kv_heads=4, ffn_width=1408)
    return replace(base, model=model, train=TrainConfig(micro_batches=4, steps=1))


def measure(*, quick: bool) -> list[ResultRow]:
    """Rows for one and for two strands, on a GPU as CUDA graphs too. Needs no second process."""
    on_gpu = torch.cuda.is_available()
    rows = _measure(configuration(quick=quick, on_gpu=on_gpu))
    if on_gpu:
        rows += _measure(configuration(quick=quick, on_gpu=on_gpu, captured=True))
    return rows


def _measure(config: RunConfig) -> list[ResultRow]:
    with process_group(deterministic=config.train.deterministic):
        session = open_session(job_of_rank(config))
        source = session.dataset.batches(config.train.micro_batch_size)
        steps = [
            [session.move(next(source)) for _ in range(config.train.micro_batches)]
            for _ in range(config.compare.steps)
        ]
        summary, _ = compare(session, steps, lambda _: None)
    modes = summary["modes"]
    how = ", captured" if config.train.cuda_graph else ""
    case = f"width {config.model.width} {config.train.dtype}{how}"
    eager = modes["eager"]["step_ms"][1:]
    rows = [
        speedup(case, "one_strand_vs_eager", modes["1"]["step_ms"][1:], eager),
        speedup(case, "two_strands_vs_eager", modes["2"]["step_ms"][1:], eager),
    ]
    if not summary["losses_identical"]:
        raise AssertionError("two strands and one strand gave different bits")
    return rows


def write(path: str) -> None:
    """Measure in full and write JSON; used where only torch is installed."""
    write_json(Path(path), "graphs", environment("no link: one rank"), measure(quick=False))


def run(*, quick: bool, json_path: Path | None) -> int:
    """Measure, print the table, write JSON if asked."""
    from interlace.report.tables import bench_table  # noqa: PLC0415  not where only torch is

    rows = measure(quick=quick)
    print(bench_table([asdict(row) for row in rows]))
    if json_path is not None:
        write_json(json_path, "graphs", environment("no link: one rank"), rows)
        print(json_path)
    return 0
