"""Proves that gradients of bfloat16 matmuls are added to their float32 buffers unrounded where the
device has a matmul that does so, and that the graph is today's where it has none.

CUDA's kernel is stood in for by one on the CPU, which exists only inside these tests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.library import Library

from interlace.graphs.accumulate import accumulate_gradients
from interlace.graphs.buffers import is_in_place, written
from interlace.graphs.op_graphs import export
from interlace.graphs.trace import StrandGraph, trace_chunk
from interlace.graphs.wide_sums import ADD_WIDE, wide_sums
from interlace.ir.graph import Kind
from interlace.measure.operands import Capture
from interlace.measure.start_up import profile_strands
from interlace.runtime.recorder import HostClock
from interlace.runtime.rival import _Builder
from interlace.runtime.traced_strands import BACKWARD, Strands, build_strands
from interlace.search.planner import make_plan

aten = torch.ops.aten
CPU = torch.device("cpu")
NARROW = frozenset({torch.bfloat16, torch.float16})
MATMULS = {"module.first.weight", "module.second.weight"}
BATCHES = 4


class Net(nn.Module):
    """Two gradients that are matmuls, one that is none (the norm's), in one loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = nn.ModuleDict(
            {
                "first": nn.Linear(24, 32, bias=False),
                "norm": nn.LayerNorm(32, bias=False),
                "second": nn.Linear(32, 16, bias=False),
            }
        ).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.module["norm"](self.module["first"](x)))
        return self.module["second"](hidden).float().square().mean()


@dataclass(frozen=True)
class Product:
    """A kernel as CUDA's: sums of products in float32, added to float32."""

    def __call__(
        self, total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, **kwargs: Any
    ) -> Tensor:
        assert total.dtype == dtype == torch.float32
        assert a.dtype == b.dtype
        return kwargs["out"].copy_(total + a.float() @ b.float())


@pytest.fixture
def kernel() -> Iterator[None]:
    """A CPU that adds 16-bit matmuls to float32."""
    library = Library("aten", "IMPL", "CPU")
    library.impl("addmm.dtype_out", Product())
    yield
    library._destroy()


def batches(dtype: torch.dtype) -> list[tuple[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(64, 24, generator=draw).to(dtype),) for _ in range(BATCHES)]


def backward(
    dtype: torch.dtype, wide: frozenset[torch.dtype], done: frozenset[str] = frozenset()
) -> StrandGraph:
    chunk = trace_chunk(Net(dtype), batches(dtype)[0])
    return accumulate_gradients(chunk, torch.float32, done=done, wide=wide)


def additions(strand: StrandGraph) -> dict[str, fx.Node]:
    """The operator that adds to each parameter's buffer."""
    parameter = {name: binding.target for name, binding in strand.bindings.items()}
    return {
        parameter[written(node)[0].name]: node for node in strand.graph.nodes if is_in_place(node)
    }


def test_matmuls_of_types_that_the_device_adds_wide_are_added_as_they_are() -> None:
    strand = backward(torch.bfloat16, NARROW)
    found = additions(strand)
    assert {name for name, node in found.items() if node.target == ADD_WIDE} == MATMULS
    assert {node.target for name, node in found.items() if name not in MATMULS} == {
        aten.add_.Tensor
    }
    for name in MATMULS:
        node = found[name]
        buffer, a, b, dtype = node.args
        assert node.kwargs == {"out": buffer}
        assert buffer.op == "placeholder"
        assert buffer.meta["val"].dtype == node.meta["val"].dtype == dtype == torch.float32
        assert {a.meta["val"].dtype, b.meta["val"].dtype} == {torch.bfloat16}
    assert not any(node.target == aten.mm.default and not node.users for node in strand.graph.nodes)


@pytest.mark.parametrize(
    ("dtype", "wide", "target"),
    [
        (torch.bfloat16, frozenset(), aten.add_.Tensor),
        (torch.bfloat16, frozenset({torch.float16}), aten.add_.Tensor),
        (torch.float32, NARROW, aten.addmm_.default),
    ],
    ids=["no kernel", "kernel of another type", "nothing to widen"],
)
def test_elsewhere_the_graph_is_what_it_was(
    dtype: torch.dtype, wide: frozenset[torch.dtype], target: Any
) -> None:
    found = additions(backward(dtype, wide))
    assert {found[name].target for name in MATMULS} == {target}


def test_gradients_that_are_dealt_with_get_no_addition() -> None:
    found = additions(backward(torch.bfloat16, NARROW, frozenset({"module.first.weight"})))
    assert found.keys() == {"module.norm.weight", "module.second.weight"}


def test_a_planner_sees_the_matmul_and_what_it_writes_to() -> None:
    """Equal FLOPs, no memory of its own, and a rival's scheduler gets a functional operator."""
    wide, plain = (export(backward(torch.bfloat16, dtypes), {}) for dtypes in (NARROW, ()))
    assert sum(op.flops for op in wide.operators) == sum(op.flops for op in plain.operators) > 0
    added = [op for op in wide.operators if op.target == str(ADD_WIDE)]
    assert len(added) == 2
    for op in added:
        assert (op.kind, op.bytes_out, len(op.writes)) == (Kind.MATMUL, 0, 1)
        assert op.flops in (2 * 64 * 24 * 32, 2 * 64 * 32 * 16)
    strand = backward(torch.bfloat16, NARROW)
    builder = _Builder({BACKWARD: strand})
    for op in wide.operators:
        builder.operator(f"{BACKWARD}.{op.id}")
    nodes = [n for n in builder.finish().graph.nodes if n.target == aten.addmm.dtype]
    assert [(len(node.args), node.kwargs) for node in nodes] == [(4, {})] * 2


def test_a_device_is_asked_by_running_a_matmul() -> None:
    """torch 2.11 to 2.13 have no such kernel for the CPU."""
    assert wide_sums(CPU) == frozenset()


def test_a_kernel_that_rounds_does_not_count(monkeypatch: pytest.MonkeyPatch, kernel: None) -> None:
    def rounding(
        self: Product, total: Tensor, a: Tensor, b: Tensor, *_: Any, out: Tensor
    ) -> Tensor:
        return out.copy_(total + a @ b)

    assert wide_sums(CPU) == NARROW
    monkeypatch.setattr(Product, "__call__", rounding)
    assert wide_sums(CPU) == frozenset()


def summed(strands: Strands, net: Net, *, two: bool) -> dict[str, Tensor]:
    """Gradient sums of a step."""
    constants: dict[tuple[str, str], Tensor] = {}
    for name, parameter in net.named_parameters():
        constants["parameter", name] = parameter.detach()
        constants["gradient", name] = torch.zeros(parameter.shape)
    plan = strands.sequential
    if two:
        example = batches(torch.bfloat16)[0]
        costs = profile_strands(strands, example, "cpu", constants, repeats=1, machine="test")
        plan = make_plan(strands.op_graphs, costs, "list")
    strands.executor(plan, constants).step(batches(torch.bfloat16))
    return {name: constants["gradient", name] for name, _ in net.named_parameters()}


def test_sums_are_unrounded_and_the_same_bits_in_one_strand_and_two(kernel: None) -> None:
    """Against the products spelled out in float32; added after rounding they are 20 times as far
    away at least. Profiling, which repeats the additions, leaves the sums alone."""
    net = Net(torch.bfloat16)
    example = batches(torch.bfloat16)[0]
    wide, plain = (
        build_strands(net, example, {}, wide_sums=dtypes) for dtypes in (wide_sums(CPU), ())
    )
    one, two = summed(wide, net, two=False), summed(wide, net, two=True)
    rounded = summed(plain, net, two=False)
    assert all(torch.equal(one[name], two[name]) for name in one)
    true = spelled_out()
    for name in MATMULS:
        size = true[name].abs().max()
        error, before = (float((x[name] - true[name]).abs().max() / size) for x in (one, rounded))
        assert error < 1e-6
        assert before > 20 * error
    assert torch.equal(one["module.norm.weight"], rounded["module.norm.weight"])


def add_products(layer: nn.Module, total: Tensor) -> None:
    """From now on `total` gets the layer's weight gradient, as a float32 product of what autograd
    has in bfloat16."""

    def forward(_: nn.Module, inputs: Any, output: Tensor) -> None:
        def backward(gradient: Tensor) -> None:
            total.add_(gradient.float().t() @ inputs[0].detach().float())

        output.register_hook(backward)

    layer.register_forward_hook(forward)


def spelled_out() -> dict[str, Tensor]:
    net = Net(torch.bfloat16)
    found = {}
    for name in ("first", "second"):
        total = found[f"module.{name}.weight"] = torch.zeros(net.module[name].weight.shape)
        add_products(net.module[name], total)
    for (x,) in batches(torch.bfloat16):
        (net(x) / BATCHES).backward()
    return found


def test_a_captured_addition_adds_to_a_copy(kernel: None) -> None:
    """Of the buffer, which the operator is given twice."""
    net = Net(torch.bfloat16)
    example = batches(torch.bfloat16)[0]
    strands = build_strands(net, example, {}, wide_sums=NARROW)
    graphs = strands.op_graphs
    key = next(op.key for op in graphs[BACKWARD].operators if op.target == str(ADD_WIDE))
    constants: dict[tuple[str, str], Tensor] = {}
    for name, parameter in net.named_parameters():
        constants["parameter", name] = parameter.detach()
        constants["gradient", name] = torch.zeros(parameter.shape)
    capture = Capture(graphs, HostClock(), wanted=frozenset({key}))
    strands.executor(strands.sequential, constants).step([example], capture)
    sums = {name: tensor.clone() for name, tensor in constants.items()}
    call = capture.compute[key]
    assert call.args[0] is call.kwargs["out"]
    before = call.args[0].clone()
    call()
    assert not torch.equal(call.args[0], before)
    assert all(torch.equal(tensor, sums[name]) for name, tensor in constants.items())
