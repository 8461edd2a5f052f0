"""The model of the bench of searched pipelines, as units whose passes take known times.

Units are the embedding, the attention and the MLP of each block, and the head. Matmuls sleep for
their FLOPs, so that much is known; what a unit takes besides is measured in a recorded step of a
pipeline whose chunks are the embedding, as many units each, and the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from interlace.search.pipelines.model_units import ModelUnit

_BOUNDARY_NS = 300_000
"""Time of a message of some KB over gloo and loopback, about; a choice."""
ChunkTimes = tuple[int, int, int]
"""ns of a forward, of gradients of inputs, and of gradients of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenSize:
    """The model and the step."""

    model: str = "3B"
    """Whose ratios these are."""
    width: int = 96
    heads: int = 4
    blocks: int = 32
    words: int = 4008
    tokens: int = 64
    """Of a micro-batch."""
    micro_batches: int = 8
    flops_per_s: float = 5e8
    """Of emulated compute."""
    repeats: int = 3

    def mlp(self, block: int) -> int:
        """The width of the MLP of a block."""
        return (8 if block % 6 == 5 else 4) * self.width

    def units(self) -> tuple[ModelUnit, ...]:
        """What passes take when compute is emulated and nothing else takes time: three times as
        many FLOPs as the forward, a third each. Attention's own FLOPs are too few to count with so
        few tokens. Units `blocks.0` and `blocks.1` are attention and MLP of the first block."""
        width = self.width
        units = [self._unit("words", 0, self.words * width, 0)]
        for block in range(self.blocks):
            first, second = f"blocks.{2 * block}", f"blocks.{2 * block + 1}"
            mlp = self.mlp(block)
            units.append(self._unit(first, 4 * width**2, 4 * width**2, 6 * width))
            units.append(self._unit(second, 2 * width * mlp, 2 * width * mlp, 4 * width + 2 * mlp))
        head = width * self.words
        units.append(self._unit("head", head, head, self.words + width))
        return tuple(units)

    def _unit(self, name: str, matmul_weights: int, weights: int, saved: int) -> ModelUnit:
        """`saved` in values a token; what is held: a weight and its gradient, all in float32."""
        ns = round(2 * self.tokens * matmul_weights / self.flops_per_s * 1e9)
        return ModelUnit(
            name=name, forward_ns=ns, input_ns=ns, weight_ns=ns, boundary_ns=_BOUNDARY_NS,
            saved_bytes=4 * self.tokens * saved, kept_bytes=4 * self.tokens * saved,
            held_bytes=8 * weights,
        )  # fmt: skip


def whole_blocks(units: Sequence[ModelUnit]) -> tuple[ModelUnit, ...]:
    """Attention and MLP of a block as one unit, by the name of the first: what "equal layers"
    counts."""
    words, *parts, head = units
    blocks = [_both(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return (words, *blocks, head)


def _both(first: ModelUnit, second: ModelUnit) -> ModelUnit:
    return replace(
        first,
        forward_ns=first.forward_ns + second.forward_ns,
        input_ns=first.input_ns + second.input_ns,
        weight_ns=first.weight_ns + second.weight_ns,
        saved_bytes=first.saved_bytes + second.saved_bytes,
        kept_bytes=first.kept_bytes + second.kept_bytes,
        held_bytes=first.held_bytes + second.held_bytes,
    )


def measuring_starts(units: Sequence[ModelUnit], chunks: int) -> tuple[int, ...]:
    """With which units the chunks of the recorded step begin: embedding and head alone, and others
    with as many units each as can be."""
    parts, middle = len(units) - 2, chunks - 2
    return (0, *(1 + number * parts // middle for number in range(middle)), len(units) - 1)


def measured(units: Sequence[ModelUnit], chunks: Sequence[ChunkTimes]) -> tuple[ModelUnit, ...]:
    """The units with what chunks that begin at `measuring_starts` took in a recorded step: what
    embedding and head took, and for each part of a block, beside its matmuls, the same."""
    words, *parts, head = units
    first, *middle, last = chunks
    found = []
    for number, name in enumerate(("forward_ns", "input_ns", "weight_ns")):
        took = sum(passes[number] for passes in middle)
        found.append((name, (took - sum(getattr(part, name) for part in parts)) // len(parts)))
    return (
        _taking(words, first),
        *(replace(p, **{name: getattr(p, name) + max(0, more) for name, more in found})
          for p in parts),
        _taking(head, last),
    )  # fmt: skip


def _taking(unit: ModelUnit, passes: ChunkTimes) -> ModelUnit:
    forward, inputs, weight = passes
    return replace(unit, forward_ns=forward, input_ns=inputs, weight_ns=weight)
