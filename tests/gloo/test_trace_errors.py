"""What cannot be traced is refused with the sub-module and the line of the user's code."""

import inspect
import logging
import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from interlace.errors import InputError
from interlace.graphs.torch_private import init_fake_world
from interlace.graphs.trace import trace_chunk
from interlace.graphs.trace_errors import refuse_flex_attention
from interlace.runtime.batch_form import BatchForm


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    """A world of two, without the second; torch's own log of failures is not of interest."""
    init_fake_world(2)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    dist.destroy_process_group()


class Part(nn.Module):
    """One linear layer, and something that cannot be traced on the line with the mark."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0


class Branches(Part):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # here
            return x
        return self.linear(x)


class Reads(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * x.max().item()  # here


class Selects(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[x[:, 0] > 0])  # here


class Writes(Part):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)  # here
        return self.linear(x)


class Statistics(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))  # here


class Broadcasts(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = functional.broadcast(x, 0, dist.group.WORLD)  # here
        return self.linear(y)


class Prints(Part):
    def forward(self, x: Tensor) -> Tensor:
        print("shape", x.shape)  # here
        return self.linear(x)


class ScalesAtRandom(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * random.random()  # here


class DrawsInPython(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if random.random() < 2 else x  # here


class Distributes(Part):
    def __init__(self) -> None:
        super().__init__()
        self.mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(distribute_tensor(x, self.mesh, [Replicate()]).to_local())  # here


class Raises(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.missing(x))  # here


class Counts(Part):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class Outer(nn.Module):
    """Holds the part two levels down."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(nn.Identity(), part)])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.square().mean()


def refusal(kind: type[Part]) -> str:
    model = Outer(kind())
    with pytest.raises(InputError) as caught:
        trace_chunk(model, (torch.randn(4, 8),))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Branches, "Data-dependent branching"),
        (Reads, "_local_scalar_dense"),
        (Selects, "nonzero"),
        (Writes, "forward writes to input 0"),
        (Statistics, "forward writes to buffer 'stages.0.1.norm.running_mean'"),
        (Broadcasts, "collective _c10d_functional.broadcast.default is not supported"),
        (Prints, "print"),
        (DrawsInPython, "cannot be traced: forward draws from Python's random module"),
        (ScalesAtRandom, "cannot be traced: forward draws from Python's random module"),
        (Distributes, "cannot be traced: distribute_tensor in forward sends a tensor from one"),
        (Raises, "cannot be traced: forward raises AttributeError: 'Raises' object has no attr"),
    ],
)
def test_the_line_and_the_module_are_named(kind: type[Part], why: str) -> None:
    """File and line of the marked line, and the sub-module that runs it."""
    text = refusal(kind)
    assert why in text
    lines, first = inspect.getsourcelines(kind)
    marked = first + next(i for i, line in enumerate(lines) if "# here" in line)
    assert f"{__file__}:{marked}, in forward" in text
    assert f"(stages.0.1: {kind.__name__})" in text
    assert "\nhint: " in text


def test_state_that_a_forward_changes_is_refused() -> None:
    """A graph would count once."""
    text = refusal(Counts)
    assert "forward changes Python state: stages.0.1" in text


class Window(Part):
    """Sets the same at every call after the first one, as Swin does."""

    def forward(self, x: Tensor) -> Tensor:
        if self.calls != 3:
            self.calls = 8
        self.calls = min(len(x), 3)
        return self.linear(x) * self.calls


def test_state_that_stays_as_it_was_is_no_change() -> None:
    """Once a forward has set it. A value that is put back in the same forward is no change either,
    and the graph has the one that was read."""
    model, x = Outer(Window()), torch.randn(4, 8)
    with pytest.raises(
        InputError, match=r"Python state: stages\.0\.1(.|\n)*call forward once before"
    ):
        trace_chunk(model, (x,), watch=True)
    model(x)
    graphs = trace_chunk(model, (x,), watch=True)
    factors = [node.args[1] for node in graphs.forward.graph.nodes if node.name.startswith("mul")]
    assert factors == [3]


class MarksItsInput(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(x).requires_grad_())


def test_what_reentrant_checkpoints_need_is_told_apart() -> None:
    """PEFT and transformers hang it on embeddings, where it says no line of the user's."""
    text = refusal(MarksItsInput)
    assert "requires_grad_()" in text
    assert "call disable_input_require_grads()" in text


class OwnSettings:
    """Settings of somebody's own, which are no configuration of transformers."""

    steps = 0


class CountsInSettings(Part):
    def __init__(self) -> None:
        super().__init__()
        self.config = OwnSettings()

    def forward(self, x: Tensor) -> Tensor:
        self.config.steps += 1
        return x * self.config.steps


def test_settings_that_a_forward_changes_are_refused() -> None:
    """transformers notes the kind of labels in `config`, each time the same; others may count."""
    assert "forward changes Python state: stages.0.1" in refusal(CountsInSettings)


class Flexible(Part):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(1, 1, *x.shape)
        return flex_attention(heads, heads, heads).view_as(x)  # here


def test_flex_attention_says_what_it_would_take() -> None:
    """In forward, as an operator of a graph that was traced where PyTorch trains it, and as a mask
    in a batch."""
    text = refusal(Flexible)
    assert "(stages.0.1: Flexible): return flex_attention(heads, heads, heads)" in text
    assert "it would take operators of a graph" in text
    graph = fx.Graph()
    graph.call_function(torch.ops.higher_order.flex_attention_backward, ())
    with pytest.raises(InputError, match="it calls flex_attention") as caught:
        refuse_flex_attention(Outer(Flexible()), graph)
    assert "scaled_dot_product_attention" in caught.value.hint
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    with pytest.raises(InputError, match=r"example_inputs\['mask'\] is a BlockMask") as caught:
        BatchForm({"x": torch.zeros(1), "mask": mask})
    assert "boolean tensor" in caught.value.hint
    assert "it would take operators of a graph" in caught.value.hint
