"""What a schedule says of itself that its actions of one step do not show: an own one may say it
too.

    @declare(settles=2)
    def my_schedule(ranks, micro_batches, chunks=1): ...
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])
Options = Mapping[str, int]
"""Of a schedule's function, by name."""
AS_SHORT = 1.01
"""Options that keep fewer values are taken if a step is at most so many times as long as the
shortest one: a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """By default nothing is known, which is right for every schedule and makes searches slower."""

    settles: int = 0
    """Behind so many micro-batches for each rank it repeats itself and keeps no more values, so
    that long steps follow from short ones; 0 if that is not known."""
    proposed: bool = False
    """Searches of layouts try it: no other schedule is as fast with less memory."""
    any_chunks: bool = False
    """It runs any number of chunks on a rank from its default on, not the default alone."""
    variants: Callable[[int], tuple[Options, ...]] | None = None
    """By number of ranks: options with which it does different things, that which keeps the least
    values first, its default last."""
    for_times: Callable[[int, float, float], Options] | None = None
    """By number of ranks, time of a pair of passes and time of its messages between two ranks in
    nanoseconds: the options to take."""

    def without_choices(self) -> "Declared":
        """With options that are given already."""
        return replace(self, any_chunks=False, variants=None, for_times=None)


_ATTRIBUTE = "declared"
"""Of the function."""


def declare(
    *,
    settles: int = 0,
    proposed: bool = False,
    any_chunks: bool = False,
    variants: Callable[[int], tuple[Options, ...]] | None = None,
    for_times: Callable[[int, float, float], Options] | None = None,
) -> Callable[[Function], Function]:
    """A decorator for a schedule's function; the fields are those of `Declared`."""
    said = Declared(
        settles=settles,
        proposed=proposed,
        any_chunks=any_chunks,
        variants=variants,
        for_times=for_times,
    )

    def with_it(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, said)
        return function

    return with_it


def declared_of(function: Callable[..., object]) -> Declared:
    """What was declared of it, or nothing."""
    found = getattr(function, _ATTRIBUTE, None)
    return found if isinstance(found, Declared) else Declared()
