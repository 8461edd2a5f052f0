"""What one rank did, as far as an analysis of overlap needs it, whatever it was read from. Times
are integer nanoseconds of the trace's own clock."""

from dataclasses import dataclass
from enum import StrEnum


class Pass(StrEnum):
    """Which part of a step something belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    END = "end"
    """After the last backward: the optimizer, and what is exchanged once a step."""
    UNKNOWN = "unknown"
    """The trace does not say what is backward."""


@dataclass(frozen=True, slots=True)
class StepPlace:
    """Where in a step something was launched."""

    step: int = 0
    """Index into `RankTrace.steps`."""
    part: Pass = Pass.UNKNOWN
    micro_batch: int = 0
    """1-based; 0 where it belongs to none."""


@dataclass(frozen=True, slots=True)
class Computed:
    """One kernel on a compute stream, or one operator on a CPU."""

    name: str
    start_ns: int
    end_ns: int
    launched_ns: int
    """When the host asked for it; on a CPU its start."""
    place: StepPlace = StepPlace()


@dataclass(frozen=True, slots=True)
class Communicated:
    """One collective, or one send or receive."""

    kind: str
    """`all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`, `send`, or the name
    that the trace has for others."""
    group: str
    """Process group as the trace names it; empty if it does not."""
    ranks: tuple[int, ...]
    """Ranks of the group; empty if the trace does not say."""
    group_size: int
    """0 if the trace does not say."""
    bytes: int | None
    """Of the larger of input and output; None if the trace does not say."""
    lane: str
    """Stream or thread; what shares one runs one after the other."""
    start_ns: int
    end_ns: int
    launched_ns: int
    place: StepPlace = StepPlace()

    @property
    def duration_ns(self) -> int:
        """Length, waiting for other ranks included."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class MarkedStep:
    """One marked training step on the host's clock."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Length."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class RankTrace:
    """The chosen steps of one rank. `computed` and `communicated` are in order of their starts."""

    rank: int
    source: str
    """File that it was read from."""
    device: str
    """`GPU`, `CPU`, or `run` for a step that Interlace recorded."""
    steps: tuple[MarkedStep, ...]
    computed: tuple[Computed, ...]
    communicated: tuple[Communicated, ...]
    left_out: str = ""
    """Steps of the trace that are not among `steps`, and why, as a sentence."""
