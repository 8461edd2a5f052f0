"""The list of everything that a full profile measures, in the order in which all ranks do it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from interlace.ir.costs import CostTable, LinkFit, fit_line
from interlace.ir.graph import Kind
from interlace.ir.noise import excess_of_fit, excess_of_oef
from interlace.measure.operands import Capture, CollectiveCall, ComputeCall
from interlace.measure.pairs import (
    copy_ns,
    measure_compute_pair,
    measure_lanes,
    measure_pair,
    time_transfer,
)
from interlace.measure.repeats import least_noisy
from interlace.measure.start_up import Profiler, longest

SMALLEST_BYTES, FEWEST_SIZES = 4096, 4
"""Smallest transfer of a fit in bytes, and the fewest sizes that a line is fitted to; a choice: 4
KiB shows the latency, and four sizes leave more points than the two numbers that are fitted."""
LINK_BUDGET_NS = 100e6
"""Time, in ns, for one size of one collective; a choice."""
PAIR_BUDGET_NS = 400e6
"""Time, in ns, for measuring one pair of a computation and a transfer; a choice."""

KindAndLane = tuple[Kind, str]


@dataclass(frozen=True)
class Measurement:
    """Something that a cost table can hold."""

    name: str
    is_in: Callable[[CostTable], bool]
    add_to: Callable[[CostTable], CostTable]
    """Measure it, and give the table with the result. Collective."""


def measurements(profiler: Profiler, alone: Callable[[], CostTable]) -> list[Measurement]:
    """Everything to measure for the graphs of `profiler`; the list depends on the graphs only.

    `alone` measures all operators and collectives alone. It comes first, since the others take the
    operator of each kind on which a step spends most time.
    """
    ops = [op for graph in profiler.graphs.values() for op in graph.operators]
    transfers = sorted({(op.kind, op.lane) for op in ops if op.is_collective})
    compute = sorted({(op.kind, op.lane) for op in ops if not op.is_collective})
    on_lane = {lane: (kind, lane) for kind, lane in reversed(transfers)}
    matmul = next((of for of in compute if of[0] is Kind.MATMUL), None)
    todo = _Todo(profiler, alone)
    return [
        todo.operators(),
        *(todo.link(of) for of in transfers),
        *(todo.pair(of, other) for of in compute for other in transfers),
        *(todo.lanes(on_lane[a], on_lane[b]) for a, b in combinations(sorted(on_lane), 2)),
        *(todo.compute_pair(matmul, of) for of in compute if matmul),
    ]


class _Todo:
    """Makes measurements that share the real inputs of one step."""

    def __init__(self, profiler: Profiler, alone: Callable[[], CostTable]) -> None:
        self.profiler = profiler
        self.clock = profiler.clock
        self.alone = alone
        self._keys: dict[KindAndLane, str] = {}
        self._inputs: Capture | None = None

    def operators(self) -> Measurement:
        """Everything alone."""

        def add_to(table: CostTable) -> CostTable:
            found = self.alone()
            return replace(
                table, operators=found.operators, issue_ns=found.issue_ns,
                queues=found.queues, behind_ns=found.behind_ns,
            )  # fmt: skip

        return Measurement("operators alone", lambda table: bool(table.operators), add_to)

    def link(self, of: KindAndLane) -> Measurement:
        """One kind of collective on one lane, alone, by size."""

        def add_to(table: CostTable) -> CostTable:
            fit = least_noisy(partial(self._fit, of, table), excess_of_fit)
            return replace(table, fits=(*table.fits, fit))

        return Measurement(
            f"{_said(of[0])} on {of[1]} by size",
            lambda table: any((fit.kind, fit.lane) == of for fit in table.fits),
            add_to,
        )

    def pair(self, of: KindAndLane, other: KindAndLane) -> Measurement:
        """A compute kind beside a collective."""

        def add_to(table: CostTable) -> CostTable:
            call, transfer = self._compute(of, table), self._collective(other, table)
            measure = partial(measure_pair, self.clock, call, transfer, budget_ns=PAIR_BUDGET_NS)
            pair = least_noisy(measure, excess_of_oef)
            return replace(table, pairs=(*table.pairs, pair))

        wanted = (of[0], *other)
        return Measurement(
            f"{_said(of[0])} with {_said(other[0])} on {other[1]}",
            lambda table: any((p.compute, p.collective, p.lane) == wanted for p in table.pairs),
            add_to,
        )

    def lanes(self, of: KindAndLane, other: KindAndLane) -> Measurement:
        """Collectives of two lanes at the same time."""

        def add_to(table: CostTable) -> CostTable:
            both = self._collective(of, table), self._collective(other, table)
            measure = partial(measure_lanes, self.clock, *both, budget_ns=PAIR_BUDGET_NS)
            found = least_noisy(measure, excess_of_oef)
            return replace(table, lane_pairs=(*table.lane_pairs, found))

        wanted = (of[1], other[1])
        return Measurement(
            f"{of[1]} with {other[1]}",
            lambda table: any((p.first, p.second) == wanted for p in table.lane_pairs),
            add_to,
        )

    def compute_pair(self, of: KindAndLane, other: KindAndLane) -> Measurement:
        """Two compute kinds at the same time."""

        def add_to(table: CostTable) -> CostTable:
            measure = partial(
                measure_compute_pair,
                self.clock,
                self._compute(of, table),
                self._compute(other, table),
                budget_ns=PAIR_BUDGET_NS,
            )
            found = least_noisy(measure, excess_of_oef)
            return replace(table, compute_pairs=(*table.compute_pairs, found))

        wanted = (of[0], other[0])
        return Measurement(
            f"{_said(of[0])} with {_said(other[0])}",
            lambda table: any((p.first, p.second) == wanted for p in table.compute_pairs),
            add_to,
        )

    def _fit(self, of: KindAndLane, table: CostTable) -> LinkFit:
        """Latency and bandwidth from powers of 4 of 4 KiB, and the sizes in the graphs."""
        collective = self._collective(of, table)
        sizes = {c.bytes for c in table.operators.values() if (c.kind, c.lane) == of}
        size = SMALLEST_BYTES
        while len(sizes) < FEWEST_SIZES or size < max(sizes):
            sizes.add(size)
            size *= 4
        samples = []
        for size in sorted(sizes):
            call = collective.resized(size)
            time_ns = time_transfer(self.clock, call, budget_ns=LINK_BUDGET_NS)
            samples.append((call.full_bytes, time_ns))
        line = fit_line(samples)
        assert line is not None
        error = max(abs(line.at(size) / max(time_ns, 1) - 1) for size, time_ns in samples)
        copy = copy_ns(self.clock, collective.x.device, samples[-1][0])
        return LinkFit(
            *of,
            latency_ns=round(line.at_zero, 1),
            ns_per_byte=round(line.slope, 6),
            largest_error=round(error, 4),
            copy_ns_per_byte=round(copy / samples[-1][0], 6),
        )

    def _compute(self, of: KindAndLane, table: CostTable) -> ComputeCall:
        return self._captured(table).compute[self._keys[of]]

    def _collective(self, of: KindAndLane, table: CostTable) -> CollectiveCall:
        return self._captured(table).collectives[self._keys[of]]

    def _captured(self, table: CostTable) -> Capture:
        """Inputs of the longest operator of each kind, by the times that all ranks agreed on."""
        if self._inputs is None:
            for collectives in (False, True):
                self._keys |= longest(self.profiler.graphs, table, collectives=collectives)
            self._inputs = self.profiler.capture(self._keys.values())
        return self._inputs


def _said(kind: Kind) -> str:
    return kind.replace("_", "-")
