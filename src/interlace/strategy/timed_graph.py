"""Operators with times, written down one after the other: what simulators run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.ir.graph import COMPUTE_LANE, Kind, Operator, OpGraph


@dataclass
class TimedGraph:
    """Operators that are written one after the other, with their times in seconds."""

    name: str
    operators: list[Operator] = field(default_factory=list)
    solo_ns: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        name: str,
        kind: Kind,
        seconds: float,
        inputs: Sequence[str],
        *,
        lane: str = COMPUTE_LANE,
        moved: float = 0.0,
    ) -> str:
        """Its name. What takes no time is left out: its first input stands for it."""
        inputs = tuple(each for each in inputs if each)
        if seconds <= 0:
            return inputs[0] if inputs else ""
        size = int(moved)
        self.operators.append(
            Operator(name, kind, kind, lane, tuple(dict.fromkeys(inputs)), (), name, size, 0, 0)
        )
        self.solo_ns[name] = max(1, round(seconds * 1e9))
        return name

    @property
    def graph(self) -> OpGraph:
        """Without times."""
        return OpGraph(self.name, tuple(self.operators), (), ())
