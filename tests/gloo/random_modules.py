"""Small modules drawn by Hypothesis: layers, layouts, frozen, tied and oddly stored parameters.

A module is a chain of layers on a matrix of activations. Over ranks every parameter is a DTensor of
a layout that is drawn for itself, and activations are laid out anew between layers, so gradients
come in every layout that DTensor's own rules give them.
"""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from strange_world import Case
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

ROWS = 4
WIDTHS = (2, 4, 6)
KINDS = ("linear", "transposed", "gain", "norm", "scale", "bias", "residual", "gate", "table")
LAYOUTS = {"whole": Replicate(), "rows": Shard(0), "columns": Shard(1)}


@dataclass(frozen=True)
class Layer:
    """One link of a chain."""

    kind: str
    width: int
    """Features that it gives, where it may change their number."""
    layout: str
    """Of its parameter."""
    after: str
    """What the activations are laid out as behind it; empty: as they come."""
    frozen: bool
    tied: bool
    """Whether it uses the parameter of the latest layer that has one of the same shape."""
    turned: bool
    """Whether the parameter lies in memory by columns."""


@dataclass(frozen=True)
class Chain:
    """A module, and how its batches lie in memory."""

    layers: tuple[Layer, ...]
    split_batch: bool
    turned_batch: bool


def chains() -> st.SearchStrategy[Chain]:
    """Chains of one to five layers, the last of which learns something."""
    layer = st.builds(
        Layer,
        kind=st.sampled_from(KINDS),
        width=st.sampled_from(WIDTHS),
        layout=st.sampled_from(sorted(LAYOUTS)),
        after=st.sampled_from(["", *sorted(LAYOUTS)]),
        frozen=st.integers(0, 4).map(lambda n: n == 4),
        tied=st.booleans(),
        turned=st.integers(0, 3).map(lambda n: n == 3),
    )
    last = layer.map(lambda each: replace(each, kind="linear", frozen=False, tied=False))
    return st.builds(
        Chain,
        layers=st.tuples(st.lists(layer, max_size=4), last).map(lambda two: (*two[0], two[1])),
        split_batch=st.booleans(),
        turned_batch=st.booleans(),
    )


class Model(nn.Module):
    """The module that a chain describes."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain
        self.weights = nn.ParameterList()
        self.weight_of: list[int] = []
        width = WIDTHS[1]
        for layer in chain.layers:
            shape, width = _shape(layer, width), _width(layer, width)
            self.weight_of.append(self._weight(layer, shape))

    def _weight(self, layer: Layer, shape: tuple[int, ...] | None) -> int:
        """The place of a layer's parameter among all, -1 if it has none."""
        if shape is None:
            return -1
        if layer.tied:
            for index in reversed(range(len(self.weights))):
                if self.weights[index].shape == torch.Size(shape):
                    return index
        values = torch.randn(shape, dtype=torch.float64)
        if layer.turned and len(shape) == 2:
            values = values.t().contiguous().t()
        self.weights.append(nn.Parameter(values, requires_grad=not layer.frozen))
        return len(self.weights) - 1

    def forward(self, x: Tensor) -> Tensor:
        mesh = next((w.device_mesh for w in self.weights if isinstance(w, DTensor)), None)
        if mesh is not None:
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
            x = x.redistribute(placements=[Shard(0) if self.chain.split_batch else Replicate()])
        for layer, index in zip(self.chain.layers, self.weight_of, strict=True):
            x = _apply(layer, x, self.weights[index] if index >= 0 else None)
            if isinstance(x, DTensor) and layer.after:
                x = x.redistribute(placements=[LAYOUTS[layer.after]])
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Replicate()]).to_local()
        return torch.tanh(x).square().mean()


def _shape(layer: Layer, width: int) -> tuple[int, ...] | None:
    """Of the parameter of a layer that gets `width` features."""
    shapes = {
        "linear": (width, layer.width),
        "transposed": (layer.width, width),
        "gain": (width,),
        "norm": (width,),
        "scale": (),
        "bias": (width,),
        "gate": (width, width),
        "table": (ROWS, width),
    }
    return shapes.get(layer.kind)


def _width(layer: Layer, width: int) -> int:
    return layer.width if layer.kind in ("linear", "transposed") else width


def _apply(layer: Layer, x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return x + torch.sin(x)
    if layer.kind == "linear":
        return x @ weight
    if layer.kind == "transposed":
        return nn.functional.linear(x, weight)
    if layer.kind == "norm":
        return nn.functional.rms_norm(x, (x.shape[-1],)) * weight
    if layer.kind in ("gain", "scale"):
        return x * weight
    if layer.kind == "gate":
        return x * torch.sigmoid(x @ weight)
    return x + weight


def lay_out(module: nn.Module, mesh: DeviceMesh) -> None:
    """Every parameter becomes a DTensor of the layout that its layer names."""
    assert isinstance(module, Model)
    for layer, index in reversed(list(zip(module.chain.layers, module.weight_of, strict=True))):
        if index < 0:
            continue
        old = module.weights[index]
        if isinstance(old, DTensor):
            continue
        split = {"rows": 1, "columns": 2}.get(layer.layout, 0)
        placement = LAYOUTS[layer.layout] if old.ndim >= split else Replicate()
        spread = distribute_tensor(old.detach(), mesh, [placement])
        module.weights[index] = nn.Parameter(spread, requires_grad=old.requires_grad)


def case_of(chain: Chain, ranks: int) -> Case:
    """The chain as a row of the table."""

    def batch() -> tuple[Tensor, ...]:
        x = torch.randn(ROWS, WIDTHS[1], dtype=torch.float64)
        return (x.t().contiguous().t(),) if chain.turned_batch else (x,)

    return Case(
        repr(chain), lambda: Model(chain), batch, lambda m, x: m(x),
        lay_out=lay_out if ranks > 1 else None,
    )  # fmt: skip
