"""Proves that the backward of a convolution as two operators, one for the input and one for the
weight and bias, has the bits of the one that autograd runs, that each half has its own FLOPs and
time, and that schedules with backwards in halves can run the second one later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import interlace
from interlace.config import PlanConfig
from interlace.graphs.joint_backwards import JOINT, split_joint_backwards
from interlace.graphs.op_graphs import export
from interlace.graphs.trace import trace_chunk
from interlace.ir.actions import Direction, Share, Strand
from interlace.models.u_transformer import PRESETS, UTransformer
from interlace.runtime.chunks import in_chunks, one_rank
from interlace.runtime.traced_strands import BACKWARD, build_strands

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Form:
    """A convolution of 6 to 8 channels, three images."""

    sides: tuple[int, ...] = (9, 8)
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    is_transposed: bool = False
    is_channels_last: bool = False
    has_bias: bool = True

    @property
    def rest(self) -> tuple[object, ...]:
        """Arguments behind the bias."""
        extra = 1 if self.is_transposed and self.stride > 1 else 0
        each = (self.stride, self.padding, self.dilation)
        stride, padding, dilation = ([n] * len(self.sides) for n in each)
        return (stride, padding, dilation, self.is_transposed, [extra] * len(self.sides),
                self.groups)  # fmt: skip

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of the output, input, weight."""
        draw = torch.Generator().manual_seed(3)
        ends = (6, 8 // self.groups) if self.is_transposed else (8, 6 // self.groups)
        x = torch.randn(3, 6, *self.sides, generator=draw).to(dtype)
        weight = torch.randn(*ends, *[self.kernel] * len(self.sides), generator=draw).to(dtype)
        if self.is_channels_last:
            x = x.to(memory_format=torch.channels_last)
        output = aten.convolution(x, weight, None, *self.rest)
        return torch.randn(output.shape, generator=draw).to(dtype), x, weight

    def backward(self, values: Sequence[Tensor], wanted: list[bool]) -> Sequence[Tensor | None]:
        """Those of the three gradients that are wanted."""
        output, x, weight = values
        sizes = [8] if self.has_bias else None
        return aten.convolution_backward(output, x, weight, sizes, *self.rest, wanted)


FORMS = {
    "3 x 3": Form(),
    "1 x 1": Form(kernel=1, padding=0),
    "strides": Form(stride=2),
    "dilated": Form(dilation=2),
    "groups": Form(groups=2),
    "without bias": Form(has_bias=False),
    "channels last": Form(is_channels_last=True),
    "one dimension": Form(sides=(17,)),
    "three dimensions": Form(sides=(5, 4, 6)),
    "transposed": Form(is_transposed=True),
    "transposed, strides": Form(is_transposed=True, stride=2),
    "transposed, groups": Form(is_transposed=True, groups=2, dilation=2),
    "one pixel": Form(sides=(1, 1)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_both_halves_have_the_bits_of_the_whole(form: Form, dtype: torch.dtype) -> None:
    values = form.values(dtype)
    whole = form.backward(values, [True, True, form.has_bias])
    first = form.backward(values, [True, False, False])
    late = form.backward(values, [False, True, form.has_bias])
    halves = (first[0], late[1], late[2])
    for one, other in zip(whole, halves, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


class Depthwise(nn.Module):
    """Convolutions of all kinds in a row: the first has no gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, stride=2)
        self.apart = nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.frozen = nn.Conv2d(8, 6, 1).requires_grad_(False)
        self.grow = nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.grow(self.frozen(self.apart(self.first(x)).relu())).square().mean()


def split_depthwise() -> dict[str, list[bool]]:
    """By name of each convolution's backward: which gradients it computes."""
    chunk = trace_chunk(Depthwise(), (torch.randn(2, 4, 9, 9),))
    split_joint_backwards(chunk)
    nodes = chunk.backward.graph.find_nodes(op="call_function", target=JOINT)
    return {node.name: list(node.args[-1]) for node in nodes}


def test_only_what_has_both_gradients_is_split() -> None:
    assert list(split_depthwise().values()) == [
        [True, False, False],  # transposed: of the input, then of weight and bias
        [False, True, True],
        [True, False, False],  # frozen
        [True, False, False],  # a group for each channel
        [False, True, True],
        [False, True, True],  # the first
    ]
    assert split_depthwise() == split_depthwise()


def test_each_half_has_its_own_flops_and_key() -> None:
    """Those of the whole backward are counted right, and each half has half of them; times go by
    keys, which differ."""
    module, batch = Depthwise(), torch.randn(2, 4, 9, 9)
    chunk = trace_chunk(module, (batch,))
    forward = [op.flops for op in export(chunk.forward, {}).operators if op.flops]
    split_joint_backwards(chunk)
    backward = [op for op in export(chunk.backward, {}).operators if op.flops]
    first, apart, frozen, grow = forward
    assert [op.flops for op in backward] == [grow, grow, frozen, apart, apart, first]
    assert len({op.key for op in backward}) == len(backward)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(batch)
    assert sum(forward) == counter.get_total_flops()


def test_strides_are_part_of_a_key() -> None:
    """Convolutions of equal inputs and other strides take other times."""
    for stride in (1, 2):
        net = nn.Sequential(nn.Conv2d(3, 3, 3, stride=stride), nn.Flatten(0))
    keys = set()
    for stride in (1, 2):
        net = _Mean(nn.Conv2d(3, 3, 3, stride=stride))
        forward = trace_chunk(net, (torch.randn(1, 3, 9, 9),)).forward
        keys |= {op.key for op in export(forward, {}).operators if op.flops}
    assert len(keys) == 2


class _Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean()


def image_loss(module: nn.Module, noisy: Tensor, level: Tensor, clean: Tensor) -> Tensor:
    return (module(noisy, level) - clean).square().mean()


def images(count: int) -> list[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(2)
    shape = (2, 1, 8, 8)
    return [
        (torch.randn(shape, generator=draw), torch.rand(2, generator=draw),
         torch.randn(shape, generator=draw))
        for _ in range(count)
    ]  # fmt: skip


class _Loss(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Tensor) -> Tensor:
        return image_loss(self.module, *batch)


def test_gradients_of_weights_are_in_the_second_half() -> None:
    """Of each convolution but the first, whose input needs no gradient."""
    module = _Loss(UTransformer(PRESETS["small"]))
    strands = build_strands(module, images(1)[0], {})
    chunks = in_chunks(strands, one_rank(2, halves=True))
    of = {share: set[str]() for share in (Share.INPUT, Share.WEIGHT)}
    for chunk in range(2):
        for share, found in of.items():
            part = chunks.parts[Strand(Direction.BACKWARD, chunk, share).label]
            found |= {node.name for node in part.operators.values() if node.target == JOINT}
    graph = strands.graphs[BACKWARD].graph
    wanted = {n.name: n.args[-1][0] for n in graph.find_nodes(op="call_function", target=JOINT)}
    assert of[Share.INPUT] == {name for name, is_input in wanted.items() if is_input}
    assert of[Share.WEIGHT] == {name for name, is_input in wanted.items() if not is_input}
    assert len(of[Share.WEIGHT]) == len(of[Share.INPUT]) + 1


def test_a_step_has_the_bits_of_autograd() -> None:
    """With whole backwards and with halves, in float64."""
    batches = images(3)
    torch.manual_seed(0)
    model = UTransformer(PRESETS["small"]).double()
    doubled = [tuple(each.double() for each in batch) for batch in batches]
    for batch in doubled:
        (image_loss(model, *batch) / len(doubled)).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    found = {}
    for schedule in ("one_strand", "zb_v"):
        model.zero_grad()
        step = interlace.compile_step(
            model, image_loss, doubled[0], schedule=schedule,
            config=PlanConfig(cluster="h100"),
        )  # fmt: skip
        step(doubled)
        found[schedule] = {name: p.grad.clone() for name, p in model.named_parameters()}
    for name, gradient in expected.items():
        assert torch.equal(found["one_strand"][name], found["zb_v"][name])
        assert (found["zb_v"][name] - gradient).abs().max() <= 1e-12 * gradient.abs().max()
