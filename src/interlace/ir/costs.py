"""CostTable: how long each operator takes alone, and how much things that overlap slow down.

Times are integer nanoseconds. Operators with equal keys cost the same, so a table for a deep model
is short. A table says where its numbers come from; a planner never mixes sources.
Times by size are a straight line (`fit_line`): fixed cost plus cost per unit of work.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from interlace.errors import InputError
from interlace.ir.graph import COMPUTE_LANE, Kind, Operator, OpGraph


@dataclass(frozen=True, slots=True)
class Line:
    """at_zero + slope * work."""

    at_zero: float
    slope: float

    def at(self, work: float) -> float:
        """The line's value at `work`."""
        return self.at_zero + self.slope * work


def fit_line(samples: Sequence[tuple[float, float]]) -> Line | None:
    """The line through (work, time) with the least squared *relative* error, neither part
    negative. One size alone gives a time in proportion to the work; no samples give None.

    Relative, because times span three orders of magnitude: plain least squares would fit the
    largest and get latencies wrong by any factor.
    """
    samples = [(work, max(time, 1.0)) for work, time in samples]
    if not samples:
        return None
    # Weighted normal equations with weights 1 / time^2.
    ones = sum(1 / time**2 for _, time in samples)
    works = sum(work / time**2 for work, time in samples)
    squares = sum(work**2 / time**2 for work, time in samples)
    times = sum(1 / time for _, time in samples)
    products = sum(work / time for work, time in samples)
    proportional = Line(0.0, products / squares) if squares else Line(times / ones, 0.0)
    if len({work for work, _ in samples}) == 1:
        return proportional
    determinant = ones * squares - works**2
    if determinant <= 0:  # one sample outweighs all others by more than a float can tell
        return proportional
    line = Line(
        (times * squares - products * works) / determinant,
        (ones * products - works * times) / determinant,
    )
    if line.at_zero < 0:
        return proportional
    return line if line.slope >= 0 else Line(times / ones, 0.0)


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """One key's time alone, and what estimates of other shapes need."""

    solo_ns: int
    spread_ns: int
    """Interquartile range over repeats at one place; 0 where the time was computed."""
    kind: Kind
    target: str
    lane: str
    bytes: int
    """Compute: bytes read and written. Collective: bytes of the full tensor."""
    flops: int

    def __post_init__(self) -> None:
        _not_negative(self, "solo_ns", "spread_ns", "bytes", "flops")

    @property
    def work(self) -> int:
        """What the time of operators of one target grows with: flops, or bytes if more."""
        return max(self.flops, self.bytes)


@dataclass(frozen=True, slots=True)
class PairCost:
    """A compute kind and a collective that run at the same time."""

    compute: Kind
    collective: Kind
    lane: str
    compute_factor: float
    """How many times longer the operator takes while the transfer is under way; at least 1."""
    transfer_factor: float
    """How many times longer the transfer takes while the operator runs; at least 1."""
    oef: float
    """Overlap effectiveness (compute_ns + transfer_ns - pair_ns) / min(compute_ns, transfer_ns):
    1 hides all of the shorter, 0 nothing, below 0 is slower than one after the other."""
    compute_ns: int = 0
    """Times of the two alone and together; 0 in a table that was not measured."""
    transfer_ns: int = 0
    pair_ns: int = 0

    def __post_init__(self) -> None:
        _not_negative(self, "compute_ns", "transfer_ns", "pair_ns")
        for name in ("compute_factor", "transfer_factor"):
            if not 1.0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} = {getattr(self, name)!r} must be a number from 1 up")


@dataclass(frozen=True, slots=True)
class Together:
    """Two things of one sort that ran at the same time: collectives on two lanes, or two compute
    operators."""

    first: str
    second: str
    first_ns: int
    second_ns: int
    pair_ns: int

    def __post_init__(self) -> None:
        _not_negative(self, "first_ns", "second_ns", "pair_ns")

    @property
    def oef(self) -> float:
        """Overlap effectiveness, as in `PairCost`."""
        return overlap_effectiveness(self.first_ns, self.second_ns, self.pair_ns)


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Time of a collective by its size: latency_ns + ns_per_byte * bytes of the full tensor."""

    kind: Kind
    lane: str
    latency_ns: float
    ns_per_byte: float
    largest_error: float = 0.0
    """Worst relative distance of a measured size from the line."""
    copy_ns_per_byte: float = 0.0
    """What a byte took to be copied within memory at the time, which no link can beat; 0 where
    that was not measured."""

    def __post_init__(self) -> None:
        _not_negative(self, "latency_ns", "ns_per_byte", "largest_error", "copy_ns_per_byte")

    def ns(self, full_bytes: int) -> int:
        """Estimated time for a full tensor of `full_bytes`."""
        return round(self.latency_ns + self.ns_per_byte * full_bytes)


@dataclass(frozen=True, slots=True)
class Contention:
    """What a simulator needs to know about things that overlap."""

    factors: Mapping[tuple[Kind, Kind], tuple[float, float]]
    """(compute kind, collective kind) -> (compute factor, transfer factor); a pair that is
    missing does not slow down."""
    links: Mapping[str, str]
    """Lane -> link. Lanes of one link share its bandwidth; others have a link of their own."""
    queues: Mapping[str, str] = field(default_factory=dict)
    """Lane -> lane in whose queue its transfers stand: they go one after another, in the order in
    which they were started, and do not share bandwidth."""
    behind_ns: Mapping[str, int] = field(default_factory=dict)
    """Key of a collective -> by how much it takes longer right behind another transfer of its link
    than alone in a step; after a pause, less by as much as that lasted."""

    @property
    def is_none(self) -> bool:
        """Whether nothing slows anything down."""
        return not (self.factors or self.links or self.queues or self.behind_ns)

    def link_of(self, lane: str) -> str:
        """What stands for all lanes that share a queue or a link with this one."""
        lane = self.queues.get(lane, lane)
        return self.links.get(lane, lane)


def _not_negative(value: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(value, name) < math.inf:
            raise InputError(f"{name} = {getattr(value, name)!r} must be a number from 0 up")


def overlap_effectiveness(first_ns: int, second_ns: int, pair_ns: int) -> float:
    """OEF of arXiv 2411.15871: (T_i + T_j - P_ij) / min(T_i, T_j); 0 if one takes no time."""
    shorter = min(first_ns, second_ns)
    return (first_ns + second_ns - pair_ns) / shorter if shorter else 0.0


def cost_of(op: Operator, solo_ns: int, spread_ns: int = 0) -> OperatorCost:
    """The entry of `op` in a table."""
    moved = max(op.bytes_in, op.bytes_out) if op.is_collective else op.bytes_in + op.bytes_out
    return OperatorCost(solo_ns, spread_ns, op.kind, op.target, op.lane, moved, op.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Times by operator key, and slow-downs by kind."""

    operators: dict[str, OperatorCost]
    source: str
    """`profile` or the name of the model that gave the times."""
    issue_ns: int = 0
    """Time for which starting one collective holds the compute lane."""
    pairs: tuple[PairCost, ...] = ()
    fits: tuple[LinkFit, ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    """Link of each lane that shares one; a lane not named has a link of its own."""
    queues: dict[str, str] = field(default_factory=dict)
    """Lane in whose queue another one's transfers stand (`Contention.queues`)."""
    behind_ns: dict[str, int] = field(default_factory=dict)
    """By key of a collective (`Contention.behind_ns`)."""
    lane_pairs: tuple[Together, ...] = ()
    """Collectives of two lanes at the same time; `first` and `second` are lanes."""
    compute_pairs: tuple[Together, ...] = ()
    """Compute beside compute; `first` and `second` are kinds."""
    graph_digest: str = ""
    machine: str = ""

    def __post_init__(self) -> None:
        _not_negative(self, "issue_ns")

    def of(self, graph: OpGraph, *, interpolate: bool = False) -> dict[str, int]:
        """Time of each operator of `graph` by its id.

        Raises InputError when the table lacks an operator; with `interpolate` only when nothing
        like it is in the table.
        """
        missing = self._missing(graph)
        if missing and not interpolate:
            raise InputError(
                f"the cost table has no time for {len(missing)} operators of graph "
                f"{graph.name!r}, the first is {min(missing)!r}",
                hint="profile this graph on this machine again, or ask for interpolation",
            )
        times = {key: cost.solo_ns for key, cost in self.operators.items()}
        times |= {key: self._estimate(graph, op) for key, op in missing.items()}
        return {op.id: times[op.key] for op in graph.operators}

    def estimated(self, graph: OpGraph) -> tuple[str, ...]:
        """Ids of the operators of `graph` whose key is not in the table."""
        return tuple(op.id for op in graph.operators if op.key not in self.operators)

    @property
    def contention(self) -> Contention:
        """Slow-downs by kinds: of several lanes the worst counts."""
        factors: dict[tuple[Kind, Kind], tuple[float, float]] = {}
        for pair in self.pairs:
            kinds = (pair.compute, pair.collective)
            compute, transfer = factors.get(kinds, (1.0, 1.0))
            factors[kinds] = (
                max(compute, pair.compute_factor),
                max(transfer, pair.transfer_factor),
            )
        return Contention(factors, dict(self.links), dict(self.queues), dict(self.behind_ns))

    @property
    def digest(self) -> str:
        """A hash of what plans depend on; ranks that plan from the same times have the same."""
        factors = [(*kinds, *values) for kinds, values in sorted(self.contention.factors.items())]
        times = {key: asdict(cost) for key, cost in self.operators.items()}
        parts: list[object] = [self.source, self.issue_ns, times, factors, self.links]
        if self.queues or self.behind_ns:
            parts += [self.queues, self.behind_ns]
        text = json.dumps([*parts, [asdict(fit) for fit in self.fits]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _missing(self, graph: OpGraph) -> dict[str, Operator]:
        """Operators without an entry, one per key."""
        return {op.key: op for op in graph.operators if op.key not in self.operators}

    def _estimate(self, graph: OpGraph, op: Operator) -> int:
        wanted = cost_of(op, 0)
        line = self._link_line(wanted) if op.is_collective else self._compute_line(wanted)
        if line is None:
            where = "" if op.lane == COMPUTE_LANE else f" on lane {op.lane!r}"
            raise InputError(
                f"operator {op.id!r} of graph {graph.name!r} cannot be estimated: the cost table "
                f"has no {op.kind} operator{where}",
                hint="profile a graph that has one",
            )
        return round(line.at(wanted.bytes if op.is_collective else wanted.work))

    def _link_line(self, wanted: OperatorCost) -> Line | None:
        for fit in self.fits:
            if (fit.kind, fit.lane) == (wanted.kind, wanted.lane):
                return Line(fit.latency_ns, fit.ns_per_byte)
        alike = [c for c in self._of_kind(wanted.kind) if c.lane == wanted.lane]
        return fit_line([(cost.bytes, cost.solo_ns) for cost in alike])

    def _compute_line(self, wanted: OperatorCost) -> Line | None:
        """Through operators of the same target, else of the same kind.

        One target's time may grow with flops while another's of its kind grows with bytes, so
        only those that are bound by the same count of work are taken.
        """
        alike = [c for c in self._of_kind(wanted.kind) if bool(c.flops) == bool(wanted.flops)]
        same = [cost for cost in alike if cost.target == wanted.target]
        return fit_line([(cost.work, cost.solo_ns) for cost in same or alike])

    def _of_kind(self, kind: Kind) -> Iterable[OperatorCost]:
        return (cost for cost in self.operators.values() if cost.kind is kind)


LARGEST_FACTOR = 3.0
"""A larger one is no slow-down but a wait for a core, or an overlap too short to see."""
SHARED_BELOW = 0.5
"""Two lanes with a lower overlap effectiveness are taken to share one link."""


def transfer_factor(alone_ns: float, beside_ns: float, overlapped_ns: float) -> float:
    """Slow-down of a transfer that took `alone_ns` alone, and `beside_ns` with compute beside it
    for `overlapped_ns` of them.

    It goes on at 1 / f of its speed while overlapped, so overlapped / f + (beside - overlapped) =
    alone. Noise can bring f below 1, which is taken as 1.
    """
    if overlapped_ns <= 0:
        return 1.0
    done_ns = max(alone_ns - beside_ns + overlapped_ns, overlapped_ns / LARGEST_FACTOR)
    return max(1.0, overlapped_ns / done_ns)


def compute_factor(alone_ns: float, beside_ns: float) -> float:
    """Slow-down of an operator that takes `alone_ns` alone and `beside_ns` beside a transfer; 1 if
    none of its calls was."""
    if alone_ns <= 0 or beside_ns <= 0:
        return 1.0
    return min(LARGEST_FACTOR, max(1.0, beside_ns / alone_ns))


def shared_links(pairs: tuple[Together, ...]) -> dict[str, str]:
    """Link by lane, for lanes that share one with another."""
    link: dict[str, str] = {}
    for pair in pairs:
        if pair.oef >= SHARED_BELOW:
            continue
        names = {link.get(lane, lane) for lane in (pair.first, pair.second)}
        members = {lane for lane, name in link.items() if name in names}
        members |= {pair.first, pair.second}
        link |= dict.fromkeys(members, "+".join(sorted(members)))
    return link
