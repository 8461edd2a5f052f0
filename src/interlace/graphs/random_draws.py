"""Random numbers that a forward draws itself, from numbers alone: stochastic depth, noise, time
steps.

As a dropout (`graphs.dropout`), such an operator gets its number in the graph and draws from a
generator of its own, seeded by that number and by the micro-batch's seeds.
"""

from typing import Any

import torch
from torch import Tensor, fx

from interlace.errors import InputError
from interlace.graphs.writer import GraphWriter

aten = torch.ops.aten
_KINDS = {
    aten.bernoulli.p: "bernoulli",
    aten.rand.default: "uniform",
    aten.rand_like.default: "uniform",
    aten.randn.default: "normal",
    aten.randn_like.default: "normal",
    aten.randint.default: "integers",
    aten.randint.low: "integers",
    aten.uniform.default: "uniform",
    aten.exponential.default: "exponential",
}
"""What is drawn, by operator."""


@torch.library.custom_op("interlace::drawn", mutates_args=())
def drawn(
    seeds: Tensor,
    seed_of_draw: int,
    kind: str,
    low: float,
    high: float,
    size: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Numbers of `size`: 0 or 1, which is 1 with probability `high` (bernoulli); uniform from `low`
    to `high`; normal; integers from `low` to below `high`; or exponential, whose rate is `high`.
    `seed_of_draw` tells the draws of a graph apart."""
    mixed = (int(seeds[0]) * 0x9E3779B97F4A7C15 + seed_of_draw) % 2**63
    generator = torch.Generator(device).manual_seed(mixed)
    value = torch.empty(size, dtype=dtype, device=device)
    if kind == "bernoulli":
        return value.bernoulli_(high, generator=generator)
    if kind == "uniform":
        return value.uniform_(low, high, generator=generator)
    if kind == "exponential":
        return value.exponential_(high, generator=generator)
    if kind == "normal":
        return value.normal_(generator=generator)
    return value.random_(int(low), int(high), generator=generator)


@drawn.register_fake
def _(
    seeds: Tensor,
    seed_of_draw: int,
    kind: str,
    low: float,
    high: float,
    size: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def can_be_seeded(node: fx.Node) -> bool:
    """Whether an operator draws what `drawn` does, into memory without gaps."""
    value = node.meta.get("val")
    seedable = node.target in _KINDS or node.target == aten.bernoulli.default
    return seedable and isinstance(value, Tensor) and value.is_contiguous()


def hint_for(node: fx.Node) -> str:
    """What to do about an operator that cannot."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" in names:
        return (
            "use dropout outside of fused attention only (attention_dropout = 0), or train with "
            "eager PyTorch"
        )
    return (
        "draw with torch.rand, randn, randint, bernoulli, uniform_ or exponential_, or outside, as "
        "one more tensor of each batch"
    )


def draw_by_number(node: fx.Node, seeds: fx.Node, seed_of_draw: int) -> None:
    """Make `drawn` of an operator that `can_be_seeded`."""
    value: Tensor = node.meta["val"]
    if node.target == aten.bernoulli.default:
        _draw_each(node, seeds, seed_of_draw)
        return
    kind = _KINDS[node.target]  # type: ignore[index]
    low, high = _bounds(node, kind)
    node.target = torch.ops.interlace.drawn.default
    node.args = (
        seeds, seed_of_draw, kind, low, high, [int(n) for n in value.shape], value.dtype,
        value.device,
    )  # fmt: skip
    node.kwargs = {}


def _draw_each(node: fx.Node, seeds: fx.Node, seed_of_draw: int) -> None:
    """A bernoulli whose first argument holds the probability of each element is 1 where a uniform
    number is below that. In half precision a probability of 0.001 would have 8 to 11 bits of
    uniform numbers to be met by, so they are drawn in float32 at least."""
    value: Tensor = node.meta["val"]
    dtype = torch.promote_types(value.dtype, torch.float32)
    write = GraphWriter(node.graph, {}, like=node).at(node)
    size = [int(n) for n in value.shape]
    uniform = write.call(
        torch.ops.interlace.drawn.default,
        seeds, seed_of_draw, "uniform", 0.0, 1.0, size, dtype, value.device,
    )  # fmt: skip
    below = write.call(aten.lt.Tensor, uniform, node.args[0])
    for new in (uniform, below):
        new.meta = {**node.meta, "val": new.meta["val"]}
    node.target = aten._to_copy.default
    node.args = (below,)
    node.kwargs = {"dtype": value.dtype}


def _bounds(node: fx.Node, kind: str) -> tuple[float, float]:
    numbers: list[Any] = [each for each in node.args if isinstance(each, int | float)]
    if kind == "bernoulli":
        return 0.0, float(numbers[0]) if numbers else float(node.kwargs.get("p", 0.5))  # type: ignore[arg-type]
    if kind == "exponential":
        rate: Any = numbers[0] if numbers else node.kwargs.get("lambd", 1.0)
        return 0.0, float(rate)
    if kind == "uniform" and node.target == aten.uniform.default:
        low, high = (numbers + [0.0, 1.0][len(numbers) :])[:2]
        return float(low), float(high)
    if kind == "integers":
        *low, high = numbers
        return float(low[0]) if low else 0.0, float(high)
    return 0.0, 1.0


def draws_values(graph: fx.Graph) -> bool:
    """Whether a forward draws numbers beside dropout."""
    return any(node.target == torch.ops.interlace.drawn.default for node in graph.nodes)


def refuse_evaluation(graph: fx.Graph) -> None:
    """Raise InputError for a forward that draws numbers: what it is without them is not known."""
    if draws_values(graph):
        raise InputError(
            "the forward draws random numbers beside dropout, and what it is without them is not "
            "known to a step that was compiled for training",
            hint="evaluate the module itself, after module.eval()",
        )
