"""What the chunks of a model hand to each other, as every rank knows it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from interlace.errors import InputError
from interlace.graphs.alike import TracedStep
from interlace.graphs.trace import Binding
from interlace.ir.actions import Direction
from interlace.ir.stage_messages import Edge

ChunkRoute = tuple[Direction, int, int]
"""Direction, chunk, and the chunk that reads what it makes."""


@dataclass(frozen=True)
class Carried:
    """A value that goes from one chunk to another."""

    binding: Binding
    """Its name among what strands hand over."""
    node: fx.Node

    @property
    def like(self) -> Tensor:
        """A fake tensor of its shape, strides and type. Raises InputError for what is none."""
        value = self.node.meta.get("val")
        if not isinstance(value, Tensor):
            raise InputError(
                f"{self.binding.target!r}, which goes from one stage to another, is no tensor: "
                f"{value!r:.80}",
                hint="cut the model elsewhere, or into fewer chunks",
            )
        return value


@dataclass(frozen=True, kw_only=True)
class Handovers:
    """What goes between the chunks of a model."""

    rank: int
    """This rank's number in the pipeline."""
    rank_of: tuple[int, ...]
    """By chunk."""
    edges: tuple[Edge, ...]
    """Which chunk reads what another one makes, in forward or, the other way round, in backward."""
    messages: Mapping[ChunkRoute, tuple[Carried, ...]]
    """What goes from chunk to chunk, of those that are on different ranks."""
    owners: Mapping[str, int]
    """By parameter that gets a gradient, the chunk that adds it up."""
    readers: Mapping[str, tuple[int, ...]]
    """By parameter, the chunks that read it."""
    traced: TracedStep
    """What the values are from."""

    def holders(self, parameter: str) -> tuple[int, ...]:
        """The ranks that hold a parameter, in order: that read it, or add up its gradient."""
        chunks = {*self.readers.get(parameter, ()), *self._owner(parameter)}
        return tuple(sorted({self.rank_of[chunk] for chunk in chunks}))

    def owner(self, parameter: str) -> int:
        """The rank that adds up the gradient of a parameter."""
        return self.rank_of[self.owners[parameter]]

    @property
    def held(self) -> frozenset[str]:
        """The parameters of this rank, by name."""
        names = {*self.readers, *self.owners}
        return frozenset(name for name in names if self.rank in self.holders(name))

    @property
    def is_alone(self) -> bool:
        """Whether all chunks are on one rank."""
        return len(set(self.rank_of)) == 1

    @property
    def shared(self) -> tuple[str, ...]:
        """The parameters with a gradient that several ranks hold, such as a head tied to the
        embedding; in order."""
        return tuple(name for name in sorted(self.owners) if len(self.holders(name)) > 1)

    def check(self) -> None:
        """Raise InputError for what cannot go from rank to rank."""
        for values in self.messages.values():
            for value in values:
                _ = value.like

    def _owner(self, parameter: str) -> Collection[int]:
        return (self.owners[parameter],) if parameter in self.owners else ()
