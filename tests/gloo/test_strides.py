"""Steps on tensors that lie in memory in another way than those that were traced."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import interlace
from interlace.config import PlanConfig
from interlace.graphs.strides import copying_views, has_overlap, restrided

QUICK = PlanConfig(cluster="h100", search="list")
BOUND = 1e-14
"""Of losses and gradients in float64."""
Batch = tuple[Tensor, ...]


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Attention(nn.Module):
    """The CPU's kernel gives other strides than its description, which the trace believes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Strided(nn.Module):
    """Parameters that are transposed, a slice, channels last, a single number, or empty, with one
    that is added to another, and the strides of what attention gives as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(8, 6).t())
        self.sliced = nn.Parameter(torch.randn(8, 12)[:, ::2])
        self.last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.one, self.none = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(3, 0))
        self.other = nn.Parameter(torch.randn(8, 6))
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        y = x @ (self.sliced + self.other) + self.turned.reshape(-1)[:6] + self.one
        y = y + self.last.view(2, 3, -1).square().mean() + self.none.sum()
        return y + torch.as_strided(self.attention(x), (4, 5, 6), (40, 8, 1))


def images(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).flatten(1).view(2, -1)[:, :4], y)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x.view(4, 5, 8)), y)


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def same(x: Tensor) -> Tensor:
    return x


def rows(x: Tensor) -> Tensor:
    """A view in which all rows are the first."""
    return x[:1].expand_as(x)


PICTURES, WORDS = (2, 3, 6, 6), (4, 5, 8)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[int, ...], tuple]] = {
    "attention": (Attention, loss, WORDS, (same, same)),
    "strided parameters": (Strided, loss, WORDS, (same, same)),
    "transposed batches": (Attention, loss, WORDS, (same, turned)),
    "an example that shares memory": (Attention, loss, WORDS, (rows, same)),
    "batches that share memory": (Attention, loss, WORDS, (rows, rows)),
    "channels last": (convolutions, images, PICTURES, (same, last)),
    "channels last in the example": (convolutions, images, PICTURES, (last, same)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_strides_change_nothing(name: str) -> None:
    """Batches, parameters and results of kernels that lie in memory in another way than the trace
    saw: losses and gradients are those of eager autograd, and gradients lie as autograd's do."""
    build, loss_fn, shape, (in_example, in_batch) = CASES[name]
    torch.manual_seed(1)
    model = build().double()
    twin = copy.deepcopy(model)
    size = (2, 4) if shape == PICTURES else (4, 5, 6 if build is Strided else 8)
    data = [(numbers(*shape), numbers(*size)) for _ in range(3)]
    batches = [(in_batch(x), y) for x, y in data]
    before = [x.clone() for x, _ in batches]
    example = (in_example(data[0][0]), data[0][1])
    strands = 2 if name == "attention" else 1
    step = interlace.compile_step(model, loss_fn, example, strands=strands, config=QUICK)
    step(batches)
    expected = torch.stack([loss_fn(twin, x.contiguous(), y) for x, y in batches])
    expected.mean().backward()
    torch.testing.assert_close(torch.stack(step.losses), expected.detach(), rtol=0, atol=BOUND)
    for (parameter, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=BOUND, msg=parameter)
        assert p.grad.stride() == q.grad.stride(), parameter
    assert all(torch.equal(x, old) for (x, _), old in zip(batches, before, strict=True))


def test_only_what_lies_otherwise_is_copied() -> None:
    """Strides of dimensions with one element do not count; memory that is shared is seen."""
    x = torch.randn(4, 1, 3)
    assert restrided(x, (3, 3, 1)) is x
    assert restrided(x, (3, 100, 1)) is x
    copied = restrided(x, (1, 4, 4))
    assert copied.stride() == (1, 4, 4)
    assert torch.equal(copied, x)
    assert has_overlap(x.expand(4, 2, 3))
    assert has_overlap(torch.randn(14).unfold(0, 8, 1))
    for separate in (x, x.transpose(0, 2), x[::2, :, 1:], torch.randn(()), torch.randn(0, 3)):
        assert not has_overlap(separate)


def test_views_that_are_written_through_stay_views() -> None:
    """A reshape that copies would lose what is written to it."""
    aten = torch.ops.aten
    graph = fx.Graph()
    buffer, value = graph.placeholder("buffer"), graph.placeholder("value")
    written = graph.call_function(aten.view.default, (buffer, [6]))
    read = graph.call_function(aten.view.default, (value, [6]))
    again = graph.call_function(aten.view.default, (buffer, [3, 2]))
    graph.call_function(aten.copy_.default, (written, read))
    graph.output((again,))
    assert copying_views(graph) == {read}
