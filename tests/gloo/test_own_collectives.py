"""Custom operators that communicate: declared ones are collectives, others are refused by name."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError
from interlace.graphs.collectives import (
    TABLE,
    Pending,
    all_to_all,
    declare,
    is_collective,
    row_of,
)
from interlace.graphs.op_graphs import export
from interlace.graphs.torch_private import init_fake_world
from interlace.graphs.trace import trace_chunk
from interlace.ir.graph import COMPUTE_LANE, Kind

WAIT = torch.ops._c10d_functional.wait_tensor


def shift(x: Tensor, group: str, steps: int) -> Pending:
    """The rows of the rank `steps` further on, in a circle; the group is not the last argument."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    receive, send = [0] * ranks, [0] * ranks
    receive[(rank + steps) % ranks] = send[(rank - steps) % ranks] = len(x)
    return all_to_all(x, receive, send, group)


@torch.library.custom_op("own_collectives::shifted", mutates_args=())
def shifted(x: Tensor, group: str, steps: int) -> Tensor:
    """As `shift`, waited for inside; eager code calls it."""
    pending = shift(x, group, steps)
    pending.work.wait()
    return pending.output.clone()


@torch.library.custom_op("own_collectives::hidden", mutates_args=())
def hidden(x: Tensor, group_name: str) -> Tensor:
    """Nobody says that it communicates."""
    return x.clone()


@torch.library.custom_op("own_collectives::grouped", mutates_args=())
def grouped(x: Tensor, group: int) -> Tensor:
    """A number is no name: this one computes."""
    return x.clone()


@torch.library.custom_op("own_collectives::filled", mutates_args={"x"})
def filled(x: Tensor, group_name: str) -> None:
    """Changes its input."""
    x.zero_()


for _op in (shifted, hidden, grouped):
    _op.register_fake(lambda x, *_: torch.empty_like(x))
shifted.register_autograd(
    lambda ctx, grad: (WAIT(shifted(grad, ctx.group, -ctx.steps)), None, None),
    setup_context=lambda ctx, inputs, output: ctx.__dict__.update(group=inputs[1], steps=inputs[2]),
)
for _op in (hidden, grouped):
    _op.register_autograd(lambda _, grad: (grad, None))
SHIFTED = torch.ops.own_collectives.shifted.default
HIDDEN = torch.ops.own_collectives.hidden.default
declare(SHIFTED, shift, Kind.SEND)


class Mixed(nn.Module):
    """A linear layer over what `op` makes of another one's result."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.op(self.first(x)))


class Loss(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def name() -> str:
    return dist.group.WORLD.group_name


@pytest.fixture
def world() -> Iterator[None]:
    """Two ranks, without the second."""
    init_fake_world(2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_a_declared_operator_has_its_kind_and_lane() -> None:
    """Forward and backward, on the mesh axis of its group; what has no group name computes."""
    group = name()
    model = Loss(lambda x: grouped(WAIT(shifted(x, group, 1)), 3))
    graphs = trace_chunk(model, (torch.randn(4, 8),))
    for strand in (graphs.forward, graphs.backward):
        ops = export(strand, {group: "tp"}).operators
        (own,) = (op for op in ops if "shifted" in op.target)
        assert (own.kind, own.lane) == (Kind.SEND, "tp")
        assert own.is_collective
        assert own.bytes_in == own.bytes_out == 4 * 8 * 4
        assert all(op.lane == COMPUTE_LANE for op in ops if op is not own)
    assert any("grouped" in op.target for op in export(graphs.forward, {group: "tp"}).operators)


@pytest.mark.usefixtures("world")
def test_an_undeclared_operator_with_a_group_is_refused() -> None:
    """By name, with what to do; and so is a declared one that nobody waits for."""
    group = name()
    with pytest.raises(InputError, match=r"operator own_collectives\.hidden\.default takes") as no:
        trace_chunk(Loss(lambda x: hidden(x, group)), (torch.randn(4, 8),))
    assert "declare(torch.ops.own_collectives.hidden.default, ...)" in no.value.hint
    with pytest.raises(InputError, match=r"shifted\.default without waiting for it") as no:
        trace_chunk(Loss(lambda x: shifted(x, group, 1)), (torch.randn(4, 8),))
    assert "wait_tensor" in no.value.hint


def test_what_cannot_be_declared() -> None:
    """An operator of another form, another row for the same one; torch's own have theirs."""
    declare(SHIFTED, shift, Kind.SEND)  # again, as it is
    for op, kind, why in (
        (shifted, Kind.SEND, "is not an operator with its overload"),
        (SHIFTED, Kind.ALL_GATHER, "is a collective already"),
        (HIDDEN, Kind.MATMUL, "kind matmul is not one of all_gather, "),
        (torch.ops.own_collectives.grouped.default, Kind.SEND, "has no argument group_name"),
        (torch.ops.own_collectives.filled.default, Kind.SEND, "does not return one new tensor"),
    ):
        with pytest.raises(InputError, match=why):
            declare(op, shift, kind)
    assert row_of(HIDDEN) is None
    for target, row in TABLE.items():
        assert target._schema.arguments[row.group].name == "group_name"
        with pytest.raises(InputError, match="is a collective already"):
            declare(target, shift, Kind.SEND)


def test_operators_of_torch_are_told_apart() -> None:
    """A wait and `native_group_norm`, whose `group` is a number, are no collectives."""
    graph = torch.fx.Graph()
    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    wanted = {
        functional.all_reduce.default: True,
        functional.broadcast.default: True,
        functional.wait_tensor.default: False,
        aten.native_group_norm.default: False,
        aten.mm.default: False,
        SHIFTED: True,
        HIDDEN: True,
    }
    assert {t: is_collective(graph.call_function(t)) for t in wanted} == wanted


def facts() -> dict[str, bool]:
    """One strand, two strands and eager autograd on two ranks."""
    with gloo_group():
        mesh, group = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), name()
        torch.manual_seed(1 + dist.get_rank())
        model = Mixed(lambda x: WAIT(shifted(x, group, 1)))
        batches = [(torch.randn(4, 8),) for _ in range(4)]
        seen = []
        for schedule in ("one_strand", "two_strand"):
            step = interlace.compile_step(
                model, lambda m, x: m(x).square().mean(), batches[0], mesh=mesh,
                schedule=schedule, per_rank=["*"],
                config=PlanConfig(cluster="h100"),
            )  # fmt: skip
            model.zero_grad()
            step(batches)
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        rows = step.record(batches).collective_rows()
        model.zero_grad()
        for (x,) in batches:
            (model(x).square().mean() / len(batches)).backward()
        plain = [p.grad for p in model.parameters() if p.grad is not None]
        return {
            "all": len(plain) == len(seen[0]) == 4,
            "same": all(map(torch.equal, *seen)),
            "right": all(map(lambda a, b: torch.allclose(a, b, rtol=1e-5), seen[0], plain)),
            "recorded": sum(row.count for row in rows if row.kind == Kind.SEND) == 8,
        }


def test_a_declared_operator_runs_in_any_order() -> None:
    """Same bits with two strands, eager gradients, and each transfer recorded."""
    for rank in run_ranks("test_own_collectives:facts", 2, timeout_s=120):
        assert all(rank.value.values()), rank.value
