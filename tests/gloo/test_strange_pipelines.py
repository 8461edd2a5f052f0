"""Modules that this project did not write, over the ranks of a pipeline: the numbers of eager
PyTorch, or a refusal by name. The rows are those of `strange_modules.py`.

`make test` runs those that are changed, refused or hold something beside layers; the wide ones are
layers that a pipeline treats like these.
"""

import os
from contextlib import nullcontext
from typing import Any

import pytest
import strange_modules
import torch
from processes import gloo_group, run_ranks
from strange_world import (
    LEARNING_RATE,
    MICRO_BATCHES,
    QUICK,
    RIGHT,
    Case,
    Wrong,
    compare_losses,
    eager,
    seeded,
)  # fmt: skip
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from traced_once import traced_once

import interlace
from interlace.errors import InterlaceError
from wide import asked, wide_unless

CASES = [case for case in strange_modules.CASES if case.lay_out is None]
SCHEDULES = {
    case.name: (("one_f_one_b", "zb_h1")[number % 2], "zb_v") for number, case in enumerate(CASES)
}
"""Of each row: two chunks, for every second row with backwards in halves, and four of these."""
LAYERS = {
    "attention, batch first", "attention with weights", "decoder layer", "pictures, channels last",
    "transposed convolution", "bilinear", "bag of words", "weight norm", "orthogonal", "GRU",
    "Llama of transformers", "one column", "chosen rows", "own gradient", "sine and sums",
    "Fourier", "sorted", "bfloat16", "assigned", "replaced layer", "norm set later",
}  # fmt: skip
"""The wide rows."""
pytestmark = pytest.mark.timeout(900)


def outcome(case: Case, mesh: DeviceMesh, schedule: str) -> str:
    """What comes of two steps, with the case's change between them."""
    try:
        _trained(case, mesh, schedule)
    except InterlaceError as error:
        return f"refused: {type(error).__name__}: {error}"
    except Wrong as error:
        return f"wrong: {error}"
    except Exception as error:  # told as an outcome: the other cases go on
        return f"crashed: {type(error).__name__}: {error}"
    return RIGHT


def _trained(case: Case, mesh: DeviceMesh, schedule: str) -> None:
    module, twin = (seeded(case.make) for _ in range(2))
    batches = [case.batch() for _ in range(MICRO_BATCHES)]
    step = interlace.compile_step(
        module, case.loss, batches[0], mesh=mesh, schedule=schedule, config=QUICK
    )
    for number in (1, 2):
        wanted = eager(case, twin, batches)
        step(batches)
        compare_losses(case, number, step.losses, wanted)
        _compare_stage(case, number, module, twin, step.strands.held_parameters)
        for each in (module, twin):
            torch.optim.SGD(each.parameters(), lr=LEARNING_RATE).step()
            each.zero_grad()
            if case.change is not None and number == 1:
                case.change(each)


def _compare_stage(
    case: Case, number: int, module: nn.Module, twin: nn.Module, held: tuple[str, ...]
) -> None:
    """The gradients of this rank's stage, and of no other weights."""
    names = {name.removeprefix("module.") for name in held}
    right = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    own = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    if own.keys() != names & right.keys():
        raise Wrong(f"step {number}: gradients of {sorted(own)}, the stage has {sorted(names)}")
    largest = max(float(each.abs().max()) for each in right.values() if each.numel())
    for name, gradient in own.items():
        error = float((gradient - right[name]).abs().max()) if gradient.numel() else 0.0
        if not error <= case.bound * largest:
            raise Wrong(f"step {number}: gradient of {name} is off by {error} of {largest}")


def every_case(names: list[str]) -> dict[str, dict[str, str]]:
    """In a rank: what comes of each case, by schedule, whose graphs are those of one trace."""
    torch.set_num_threads(1)
    with gloo_group(60):
        world = int(os.environ["WORLD_SIZE"])
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
        found = {}
        for case in CASES:
            if case.name in names:
                with traced_once() if case.change is None else nullcontext():
                    found[case.name] = {
                        name: outcome(case, mesh, name) for name in SCHEDULES[case.name]
                    }
        return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, dict[str, str]]]:
    """Outcomes by rank, case that was asked for, and schedule."""
    names = [case.name for case in asked(request, "case")]
    results: list[Any] = run_ranks(
        "test_strange_pipelines:every_case", 2, args=[names], timeout_s=600
    )
    return [result.value for result in results]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=wide_unless(case.name not in LAYERS)) for case in CASES],
    ids=lambda case: case.name,
)
def test_right_or_refused(case: Case, found: list[dict[str, dict[str, str]]]) -> None:
    """On both ranks alike. A model may be too small for so many chunks."""
    for schedule in SCHEDULES[case.name]:
        of_ranks = [each[case.name][schedule] for each in found]
        for each in of_ranks:
            if each == RIGHT and not case.refused:
                continue
            assert each.startswith("refused"), each
            assert case.refused or "too few for" in each, each


def test_most_are_right(found: list[dict[str, dict[str, str]]]) -> None:
    """Refusals are for what cannot run."""
    assert {case.name for case in CASES} >= LAYERS
    can_run = [case.name for case in CASES if not case.refused and case.name in found[0]]
    right = [name for name in can_run if found[0][name][SCHEDULES[name][0]] == RIGHT]
    assert len(right) > 0.9 * len(can_run)
