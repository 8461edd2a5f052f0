"""A captured chunk: forward and backward in one graph, and what its inputs and outputs are."""

from dataclasses import dataclass

from torch import fx, nn
from torch.distributed.tensor import Placement

_INPUT = "input_of"
"""Key in the `meta` of a placeholder under which it says what it stands for."""


@dataclass(frozen=True)
class InputOf:
    """What a placeholder stands for."""

    role: str
    """`parameter`, `buffer`, `batch`, `tangent`, `mesh` or `saved`."""
    target: str
    """Qualified name of the parameter or buffer (of a mesh: its parameter), index of the batch
    input, or empty."""


@dataclass(frozen=True)
class GradientOf:
    """What an output of a backward stands for."""

    parameter: str
    placements: tuple[Placement, ...] | None
    """Layout of the gradient if the parameter is a DTensor; may be partial."""


@dataclass(frozen=True)
class Joint:
    """A captured chunk: forward and backward in one graph, in the order in which they ran."""

    graph: fx.Graph
    """Returns the loss, then gradients."""
    root: nn.Module
    """Holds the constants of the graph."""
    gradients: tuple[GradientOf, ...]
    """What the outputs after the loss are."""
    writes: tuple[tuple[InputOf, fx.Node], ...] = ()
    """Inputs that the forward writes to, and the node with the value that each gets."""
    results: tuple[fx.Node, ...] = ()
    """The tensors that it gives beside the loss."""


def input_of(placeholder: fx.Node) -> InputOf:
    """What a placeholder of a captured graph, or of a part of one, stands for."""
    return placeholder.meta.get(_INPUT) or InputOf("saved", placeholder.name)


def set_input(placeholder: fx.Node, what: InputOf) -> None:
    """Say what a placeholder stands for."""
    placeholder.meta[_INPUT] = what
