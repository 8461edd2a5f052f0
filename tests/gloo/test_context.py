"""Context parallelism against attention on one device, spelled out, in float64."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from interlace.errors import InputError
from interlace.models.attention import CausalAttention
from interlace.parallel.block_attention import FLASH_CPU, PLAIN, attend, attend_backward
from interlace.parallel.context import METHODS, apply_context_parallel, local_positions
from interlace.parallel.ulysses import kv_copies

SEQUENCE, BATCH, SIZE = 48, 2, 8
BOUND = 1e-10
HEADS = {2: ((4, 4), (4, 1), (6, 2)), 4: ((4, 4), (8, 2), (4, 1), (12, 3)), 3: ((6, 2),)}
"""Per number of ranks, (query heads, key/value heads): heads that ranks divide, fewer heads than
ranks, and heads that ranks do not divide."""


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [S, B, H, E] of a whole sequence, score by score."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbhe,tbhe->bhst", q, k) / q.shape[-1] ** 0.5
    future = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool).triu(1)
    return torch.einsum("bhst,tbhe->sbhe", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def sequence(heads: int, kv_heads: int) -> list[Tensor]:
    """q, k, v and the gradient of the output, the same on every rank; some scores are large."""
    draw = torch.Generator().manual_seed(heads * 100 + kv_heads)
    return [
        torch.randn(SEQUENCE, BATCH, h, SIZE, generator=draw, dtype=torch.float64) * scale
        for h, scale in ((heads, 6.0), (kv_heads, 1.0), (kv_heads, 1.0), (heads, 1.0))
    ]


def errors(method: str, heads: int, kv_heads: int, dtype: torch.dtype) -> dict[str, float]:
    """Largest error of the output and of each gradient, relative to the largest true value."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    model = nn.ModuleDict({"core": CausalAttention()})
    apply_context_parallel(model, mesh, {"core": "attention"}, method, SEQUENCE)
    mine = local_positions(SEQUENCE, ranks, rank, method)
    *whole, grad = (x.to(dtype).double() for x in sequence(heads, kv_heads))
    whole = [x.requires_grad_() for x in whole]
    expected = reference(*whole)
    true = [expected, *torch.autograd.grad(expected, whole, grad)]
    own = [x.detach()[mine].to(dtype).requires_grad_() for x in whole]
    out = model["core"](*own)
    found = [out, *torch.autograd.grad(out, own, grad[mine].to(dtype))]
    return {
        f"{method}, {heads} heads, {kv_heads} kv heads, {dtype}: {name}": float(
            (x.detach() - y[mine].detach()).abs().max() / y.detach().abs().max()
        )
        for name, x, y in zip(("out", "dq", "dk", "dv"), found, true, strict=True)
    }


def attention_child() -> list[dict[str, float]]:
    """Errors in float64, and in bfloat16."""
    exact: dict[str, float] = {}
    rounded: dict[str, float] = {}
    with gloo_group():
        for method in METHODS:
            for heads, kv_heads in HEADS[dist.get_world_size()]:
                exact |= errors(method, heads, kv_heads, torch.float64)
            rounded |= errors(method, 12, 6, torch.bfloat16)
    return [exact, rounded]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_of_ranks_is_attention_of_one_device(ranks: int) -> None:
    """Output and gradients of q, k and v, with equal and with grouped heads, by both methods."""
    for result in run_ranks("test_context:attention_child", ranks):
        exact, rounded = result.value
        assert len(exact) == 2 * 4 * len(HEADS[ranks])
        assert not {name: error for name, error in exact.items() if not error < BOUND}
        assert not {name: error for name, error in rounded.items() if not error < 0.02}


@pytest.mark.parametrize("method", METHODS)
def test_ranks_hold_each_position_once(method: str) -> None:
    """Of 4 ranks; with ring each holds a chunk from either end, so that causal work is equal."""
    held = [local_positions(32, 4, rank, method) for rank in range(4)]
    assert torch.cat(held).sort().values.tolist() == list(range(32))
    assert all((own.diff() > 0).all() for own in held)
    work = {int((own + 1).sum()) for own in held}
    assert (len(work) == 1) == (method == "ring")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "copies"),
    [(8, 8, 4, 1), (8, 4, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 4, 6, 3), (12, 3, 4, 4)],
)
def test_no_more_copies_of_keys_than_needed(
    heads: int, kv_heads: int, ranks: int, copies: int
) -> None:
    """Copied heads are dealt out evenly, and every rank finds those of its query heads, in groups;
    a smaller number of copies would not do."""

    def fits(count: int) -> bool:
        if kv_heads * count % ranks or heads % (kv_heads * count):
            return False
        served = [head * kv_heads // heads for head in range(heads)]
        dealt = [head // count for head in range(kv_heads * count)]
        share = heads // (kv_heads * count)
        return served == [head for head in dealt for _ in range(share)]

    assert kv_copies(heads, kv_heads, ranks) == copies
    assert fits(copies)
    assert not any(fits(count) for count in range(1, copies))


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_of_blocks_agree(causal: bool) -> None:
    """The plain kernel, which devices without flash attention use, and the flash kernel give the
    same output, log-sum-exp and gradients."""
    q, k, v, grad = (x.permute(1, 2, 0, 3) for x in sequence(6, 2))
    plain, flash = (attend(q, k, v, causal=causal, kernel=kernel) for kernel in (PLAIN, FLASH_CPU))
    plain_gradients, flash_gradients = (
        attend_backward((q, k, v), grad, *flash, causal=causal, kernel=kernel)
        for kernel in (PLAIN, FLASH_CPU)
    )
    pairs = zip((*plain, *plain_gradients), (*flash, *flash_gradients), strict=True)
    assert all(torch.allclose(x, y, rtol=1e-10, atol=1e-12) for x, y in pairs)


class Model(nn.Module):
    """Has everything that a plan can name."""

    def __init__(self) -> None:
        super().__init__()
        self.core = CausalAttention()
        self.linear = nn.Linear(4, 4)
        self.table = nn.Embedding(10, 4)
        self.rotary = nn.Module()
        self.rotary.register_buffer("cos", torch.arange(8.0).unsqueeze(1), persistent=False)
        self.short = nn.BatchNorm1d(4)


def plan_child() -> dict[str, Any]:
    """What each plan does on rank 1 of 2, with sequences of 8."""
    plans = {
        "none": {},
        "role": {"core": "attention", "linear": "columns"},
        "name": {"cores": "attention"},
        "linear": {"linear": "attention"},
        "no buffer": {"core": "attention", "linear": "positions"},
        "short": {"core": "attention", "short": "positions"},
    }
    messages = {}
    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        for name, plan in plans.items():
            with pytest.raises(InputError) as caught:
                apply_context_parallel(Model(), mesh, plan, "ring", 8)
            messages[name] = str(caught.value)
        with pytest.raises(InputError) as caught:
            apply_context_parallel(Model(), mesh, {"core": "attention"}, "ring", 6)
        messages["length"] = str(caught.value)
        model = Model()
        whole = model.table.weight
        everything = {"core": "attention", "table": "positions", "rotary": "positions"}
        apply_context_parallel(model, mesh, everything, "ring", 8)
        rows = model.table(torch.arange(4))
        return {
            "messages": messages,
            "rotary": model.rotary.get_buffer("cos").flatten().tolist(),
            "rows": [int((whole == row).all(1).nonzero()) for row in rows],
            "same parameter": model.table.weight is whole,
            "buffers saved": [name for name in model.state_dict() if "cos" in name],
        }


def test_plans_cut_positions_or_say_what_is_wrong() -> None:
    """A rank keeps the rows of its own positions, in its order; the table stays one parameter.
    A plan that does not fit is an error that names the module."""
    first, second = (result.value for result in run_ranks("test_context:plan_child", 2))
    assert first["rotary"] == first["rows"] == [0, 1, 6, 7]
    assert second["rotary"] == second["rows"] == [2, 3, 4, 5]
    assert first["same parameter"]
    assert first["buffers saved"] == []
    for name, text in {
        "none": "names none",
        "role": "no role 'columns'",
        "name": "'core'",
        "linear": "linear has the role 'attention' and is a Linear",
        "no buffer": "linear has the role 'positions' and holds no buffer",
        "short": "short.running_mean has 4 rows",
        "length": "6 tokens cannot be cut into 4",
    }.items():
        assert text in first["messages"][name]


def test_heads_that_ulysses_cannot_divide() -> None:
    """Six query heads on four ranks: the message says what to set."""
    with pytest.raises(InputError, match=r"6 query heads[\s\S]*context_method to ring"):
        kv_copies(6, 2, 4)
