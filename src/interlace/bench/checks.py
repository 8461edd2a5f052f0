"""What it costs a step to check that the module is still what it was compiled for.

One process compiles a step of a Llama and runs it with the check and without, in turns, so that a
machine that slows down slows both. As two steps differ by more than the check takes, each step with
the check is also compared with itself: with its time less what the check took inside it. What ranks
compare (weights, code, seeds) is compared when a step is compiled and when the user asks, never in
a step.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from interlace.api import Step, compile_step
from interlace.bench.results import ResultRow, environment, slowdown, write_json
from interlace.config import ModelConfig, PlanConfig
from interlace.models import model_file
from interlace.runtime.binding import ModuleBinding
from interlace.runtime.executor import Batch

MICRO_BATCHES = 4
"""Micro-batches of the step whose check is timed."""


def run(*, quick: bool, json_path: Path | None, layers: int = 32, width: int = 256) -> int:
    """Time steps with and without the check, print the table; write JSON if asked."""
    torch.set_num_threads(1)
    model = ModelConfig(
        layers=layers, width=width, heads=width // 64, kv_heads=width // 64,
        ffn_width=11 * width // 4, vocab_size=512,
    )  # fmt: skip
    step, batches = _compiled(model, sequence_length=64 if quick else 256)
    print(f"compiled: {layers} layers", file=sys.stderr)
    with_check, without, less = _timed(step, batches, turns=5 if quick else 30)
    case = f"Llama of {layers} layers x {width}, {MICRO_BATCHES} micro-batches, one process"
    rows = [
        slowdown(case, "step with the check over step without", with_check, without),
        slowdown(case, "step with the check over the same less its check", with_check, less),
    ]
    _print(rows)
    if json_path is not None:
        write_json(json_path, "checks", environment("no link, one process"), rows)
        print(json_path)
    return 0


def _compiled(model: ModelConfig, sequence_length: int) -> tuple[Step, list[Batch]]:
    torch.manual_seed(1)
    module = model_file("llama").build(model, model.vocab_size, sequence_length)
    batches: list[Batch] = [
        tuple(torch.randint(0, model.vocab_size, (1, sequence_length)) for _ in range(2))
        for _ in range(MICRO_BATCHES)
    ]
    config = PlanConfig(cache=False)
    step = compile_step(module, _loss, batches[0], strands=1, config=config)
    return step, batches


def _loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits_SBV = module(tokens)
    return F.cross_entropy(logits_SBV.flatten(0, 1), targets.t().flatten())


def _timed(
    step: Step, batches: list[Batch], *, turns: int
) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of (a step with the check, one without, the first less its check), turn by
    turn."""
    check, taken = ModuleBinding.check, [0.0]

    def timed_check(binding: ModuleBinding) -> bool:
        begin = time.perf_counter_ns()
        rebound = check(binding)
        taken[0] = (time.perf_counter_ns() - begin) / 1e6
        return rebound

    step(batches)
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for turn in range(turns):
        first = turn % 2  # which of the two comes first changes from turn to turn
        for which in (first, 1 - first):
            if which == 0:
                with mock.patch.object(ModuleBinding, "check", timed_check):
                    found[0].append(_ms(lambda: step(batches)))
                found[2].append(found[0][-1] - taken[0])
            else:
                with mock.patch.object(ModuleBinding, "check", return_value=False):
                    found[1].append(_ms(lambda: step(batches)))
    return found


def _ms(call: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e6


def _print(rows: list[ResultRow]) -> None:
    table = Table("", "ms", "of ms", "ratio", "range", title=rows[0].case)
    for row in rows:
        assert row.ratio is not None
        assert row.spread is not None
        low, high = row.spread
        table.add_row(
            row.metric, f"{row.ours:.3f}", f"{row.baseline:.3f}", f"{row.ratio:.5f}",
            f"{low:.5f} to {high:.5f}",
        )  # fmt: skip
    Console(width=110).print(table)
