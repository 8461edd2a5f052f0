"""Architectures of transformers and of torch, trained by a compiled step and by eager PyTorch.

Every row of the tables in `architectures.py` and `habits.py` takes four optimizer steps on one
rank. On two do those whose models publish a plan, by transformers' own tensor parallelism, and one
or more of each kind on replicas that share its micro-batches. Losses, whole gradients and weights
must be those of an eager twin, or the module is refused before the first step, with the reason and
the line.

`make test` runs one or more of each heading of the table, every refusal and all habits; the wide
rows are other models of the same headings.
"""

import os
import re
import warnings
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from architectures import BY_PLAN, CASES, ON_TWO_RANKS, PLANNED
from habits import HABITS
from processes import gloo_group, run_ranks
from strange_world import (
    MICRO_BATCHES,
    QUICK,
    RIGHT,
    Case,
    Wrong,
    compare_gradients,
    compare_losses,
    eager,
    mesh_of,
    seeded,
)
from torch import nn
from torch.distributed.tensor import DTensor

import interlace
from interlace.errors import InterlaceError
from wide import asked, wide_unless

STEPS = 4
ROWS = {1: [*CASES, *HABITS], 2: [*ON_TWO_RANKS, *HABITS]}
"""By number of ranks."""
OF_EACH_HEADING = {
    1: (
        "Llama", "Gemma 3", "Qwen3-MoE", "Mamba", "BERT", "DeBERTa v2", "T5", "ConvNeXt", "CLIP",
        "Wav2Vec 2.0", "denoising U-Net", "nn.Transformer", "LSTM in both directions",
    ),
    2: ("GPT-2", "BERT", f"Llama{BY_PLAN}", f"Gemma 2{BY_PLAN}"),
}  # fmt: skip
"""By number of ranks: what is not wide, beside refusals and habits."""
REFUSAL = r"refused: InputError: [^\n]{15,300}(\n  \S+:\d+, in [^\n]+)?\nhint: [^\n]+"
"""The reason, then the line of the source if one is known, then what to do, and no dump of
anything."""
NOT_NOISE = 1e-3
"""The epsilon of optimizers that divide by a gradient's size: where the true gradient is 0, as that
of a key's bias, they would make whole steps of rounding."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.01, eps=NOT_NOISE, weight_decay=0.1),
    "Adagrad": lambda given: torch.optim.Adagrad(given, lr=0.01, eps=NOT_NOISE),
    "RMSprop": lambda given: torch.optim.RMSprop(given, lr=0.01, eps=NOT_NOISE),
    "NAdam": lambda given: torch.optim.NAdam(given, lr=0.01, eps=NOT_NOISE),
}


def outcome(case: Case, optimizer: str) -> str:
    try:
        trained(case, OPTIMIZERS[optimizer])
    except InterlaceError as error:
        return f"refused: {type(error).__name__}: {error}"
    except Wrong as error:
        return f"wrong: {error}"
    except Exception as error:  # told as an outcome: the other cases go on
        return f"crashed: {type(error).__name__}: {error}"
    return RIGHT


def trained(case: Case, make: Callable[..., torch.optim.Optimizer]) -> None:
    """Raises Wrong for other numbers than the twin's. The twin sees all micro-batches; ranks that
    have copies of the module share them."""
    module, twin = (seeded(case.make) for _ in range(2))
    batches = [case.batch() for _ in range(MICRO_BATCHES)]
    mesh, mine = mesh_of(case), slice(None)
    if mesh is not None and case.lay_out is not None:
        case.lay_out(module, mesh)
    elif mesh is not None:
        mine = slice(mesh.get_local_rank(), None, mesh.size())
    step = interlace.compile_step(module, case.loss, batches[0], mesh=mesh, config=QUICK)
    optimizers = [make(each.parameters()) for each in (module, twin)]
    for number in range(1, STEPS + 1):
        if case.tell is not None:
            case.tell(twin, step, mine.step or 1)
        wanted = eager(case, twin, batches)
        step(batches[mine])
        compare_losses(case, number, step.losses, wanted[mine])
        compare_gradients(case, number, module, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _compare_weights(case, module, twin)


def _compare_weights(case: Case, module: nn.Module, twin: nn.Module) -> None:
    for (name, found), wanted in zip(module.named_parameters(), twin.parameters(), strict=True):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        if not torch.allclose(whole, wanted, rtol=100 * case.bound, atol=100 * case.bound):
            raise Wrong(f"weight {name} is off by {float((whole - wanted).abs().max())}")


def every_case(names: list[str]) -> dict[str, str]:
    """In a rank: what comes of each case."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of transformers, which runs without optional kernels
    rows = ROWS[int(os.environ["WORLD_SIZE"])]
    with gloo_group():
        return {
            case.name: outcome(case, optimizer)
            for case, optimizer in zip(rows, cycle(OPTIMIZERS), strict=False)
            if case.name in names
        }


pytestmark = pytest.mark.timeout(600)  # the first test waits for all modules on 1 and 2 ranks


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[int, list[dict[str, str]]]:
    """Outcomes by number of ranks, by rank, by case that was asked for."""
    results = {}
    for ranks in (1, 2):
        names = [case.name for case in asked(request, "case", ranks=ranks)]
        done = run_ranks("test_architectures:every_case", ranks, args=[names], timeout_s=280)
        results[ranks] = [result.value for result in done]
    return results


def is_quick(case: Case, ranks: int) -> bool:
    return bool(case.refused) or case in HABITS or case.name in OF_EACH_HEADING[ranks]


def test_the_table_is_large() -> None:
    """No row hides behind another's name, nobody thins the table out unseen, and what is said of
    its size is so."""
    names = {case.name for case in (*CASES, *PLANNED, *HABITS)}
    assert len(names) == len(CASES) + len(PLANNED) + len(HABITS)
    trained = {case.name.removesuffix(BY_PLAN) for case in (*CASES, *PLANNED) if not case.refused}
    on_two = {case.name.removesuffix(BY_PLAN) for case in ON_TWO_RANKS if not case.refused}
    assert len(on_two) >= 20
    for file in ("CHANGELOG.md", "tests/README.md"):
        text = (Path(__file__).parents[2] / file).read_text(encoding="utf-8")
        assert f"{len(trained)} architectures of `transformers` and of torch" in text, file
    optimizers = {
        optimizer
        for case, optimizer in zip(ROWS[1], cycle(OPTIMIZERS), strict=False)
        if case.name in OF_EACH_HEADING[1]
    }
    assert optimizers == set(OPTIMIZERS)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        pytest.param(case, ranks, marks=wide_unless(is_quick(case, ranks)))
        for ranks, rows in ROWS.items()
        for case in rows
    ],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_trains_as_eager_pytorch_does_or_is_refused(
    case: Case, ranks: int, found: dict[int, list[dict[str, str]]]
) -> None:
    """A refusal has the reason first, then the line of the source, and a hint."""
    for of_rank in found[ranks]:
        outcome = of_rank[case.name]
        if not case.refused:
            assert outcome == RIGHT
        else:
            assert re.search(f"(?s)^refused: InputError.*{case.refused}", outcome), outcome
            assert re.fullmatch(REFUSAL, outcome), outcome
