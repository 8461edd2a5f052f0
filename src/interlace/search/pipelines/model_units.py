"""A model as a row of units, and the pipeline that is wanted for it.

A unit is a part of the model that is never cut: a layer, an embedding, a head. Units run one after
the other, each reads the one before.
"""

from dataclasses import dataclass

from interlace.errors import InputError

_MOST_RANKS = 256
"""Ranks of a pipeline beyond which the search would take minutes; a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnit:
    """What one unit costs a rank, for one micro-batch if nothing else is said."""

    name: str
    """As the sub-module is called in the model, so that `split_at` can name it."""
    forward_ns: int
    input_ns: int
    """Gradients of inputs."""
    weight_ns: int
    """Gradients of weights; a whole backward takes both."""
    boundary_ns: int = 0
    """How long what it hands to the next unit takes to another rank, and its gradient back."""
    saved_bytes: int = 0
    """What a forward keeps for its backward."""
    kept_bytes: int = 0
    """What of it, and of what the gradients of inputs made, the gradients of weights need."""
    held_bytes: int = 0
    """What its rank has all the time: weights, gradients, state of the optimizer."""

    @property
    def work_ns(self) -> int:
        """All passes of a micro-batch."""
        return self.forward_ns + self.input_ns + self.weight_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProblem:
    """Find a pipeline of these units. Raises InputError for numbers that make no pipeline."""

    units: tuple[ModelUnit, ...]
    ranks: int
    micro_batches: int
    memory_bytes: int = 0
    """Most that a rank may hold and keep at a time; 0 for no limit."""
    everywhere_bytes: int = 0
    """What every rank has, whichever units are its own."""
    overlap: float = 0.0
    """How much shorter a forward and a backward are side by side than one after the other, as a
    share of their time; but never shorter than the longer of both."""
    most_chunks: int = 2
    """Most chunks that a rank has on average."""

    def __post_init__(self) -> None:
        for name in ("ranks", "micro_batches", "most_chunks"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"no pipeline has {name} = {getattr(self, name)}", hint="1 or more"
                )
        if self.ranks > _MOST_RANKS:
            raise InputError(
                f"{self.ranks} ranks are too many for the search", hint=f"up to {_MOST_RANKS}"
            )
        if not 0 <= self.overlap <= 1:
            raise InputError(
                f"overlap = {self.overlap:g} is no share", hint="0 (nothing hidden) to 1"
            )
        if len(self.units) < self.ranks:
            raise InputError(
                f"{len(self.units)} units cannot be cut into chunks for {self.ranks} ranks",
                hint="use fewer ranks, or give smaller units (layers instead of blocks of them)",
            )
        if not any(unit.work_ns for unit in self.units):
            raise InputError("all passes of all units take no time", hint="set forward_ms above 0")
        for unit in self.units:
            self._check_unit(unit)

    @staticmethod
    def _check_unit(unit: ModelUnit) -> None:
        for name in ("forward", "input", "weight", "boundary"):
            if getattr(unit, f"{name}_ns") < 0:
                raise InputError(f"unit {unit.name!r} has a {name} time below 0", hint="0 or more")
        for name in ("saved", "kept", "held"):
            if getattr(unit, f"{name}_bytes") < 0:
                raise InputError(f"unit {unit.name!r} has {name} bytes below 0", hint="0 or more")
