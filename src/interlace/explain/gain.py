"""What hiding communication could gain in a traced step: bounds, and a simulation.

Let a step take T, of which E is exposed communication, and let C = T - E be all the rest. Let N be
the time in which the busiest communication stream is busy. The step is taken with M micro-batches:
as many as the trace has, or more if asked for.

    two strands     gain <= min(T - max(C, N), E_passes (M - 1) / M)
    decomposition   gain <= sum over its sites of min(exposed, matmul (n - 1) / n)
    both            gain <= T - max(C, N)

The first holds because the compute lane and the busiest stream each do all of their work one after
the other, and because the first forward and the last backward have no other strand beside them;
E_passes is what is exposed inside of forwards and backwards. n is the number of ranks of a site.

The simulation interleaves the forward and the backward of a micro-batch (the list scheduling of
`search`, each order as `sim.lanes` runs it without contention), M times in the schedule
`two_strand`; the result is the mean over up to four micro-batches of the step. It compares
simulated with simulated: a gain is the part by which the simulated passes get shorter, of the
passes as they were measured, and never above the bound.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import mean

from interlace.explain.decomposed_graphs import decomposed, most_ns
from interlace.explain.exposure import exposed_in, windows
from interlace.explain.pass_graphs import PassGraph, busy_times, pass_graph
from interlace.explain.rank_trace import Communicated, Pass, RankTrace
from interlace.ir import interval_sets as sets
from interlace.ir.graph import merge
from interlace.search.evaluator import Evaluator
from interlace.search.list_scheduling import order_list
from interlace.search.problem import Problem

USUAL_MICRO_BATCHES = 4
"""Micro-batches of the step that is considered if the trace has one, or does not say; a choice."""
TWO_STRANDS, DECOMPOSITION, BOTH = "two_strands", "decomposition", "both"
"""Names of the ways to hide communication."""
_PASSES = (Pass.FORWARD, Pass.BACKWARD)
_SAMPLES = 4
"""Micro-batches of a step that are simulated at most; a choice that bounds the time of it."""
_OPERATORS = 4000
"""Operators in these micro-batches, of which one is simulated whatever its size; a choice, some ten
seconds."""
_AS_TRACED = "as traced"
"""Key of the length in the order of the trace."""


@dataclass(frozen=True, slots=True)
class Gain:
    """One way to hide communication, in ns of a step."""

    way: str
    at_most_ns: int
    simulated_ns: int | None
    """None if the trace does not say what is forward and what is backward."""


@dataclass(frozen=True, slots=True)
class Gains:
    """What could be gained in one step of one rank."""

    rank: int
    step: str
    """Name of the step: that of median length, the shorter of two."""
    traced_micro_batches: int
    """0 if the trace does not say."""
    micro_batches: int
    step_ns: int
    """The traced step, with so many micro-batches like its own."""
    exposed_ns: int
    replayed_over_measured: float | None
    """The simulated passes in the order of the trace, over what they took: how far the simulation
    can be trusted."""
    ways: tuple[Gain, ...]
    why_not_simulated: str = ""

    def of(self, way: str) -> Gain:
        """One of the ways."""
        return next(each for each in self.ways if each.way == way)


def gains(trace: RankTrace, micro_batches: int = 0) -> Gains:
    """Of the step of median length; `micro_batches` 0 takes the number of the trace, at least 4
    where it has one."""
    by_length = sorted(range(len(spans := windows(trace))), key=lambda i: spans[i][1] - spans[i][0])
    steps = sorted({each.place.step for each in (*trace.computed, *trace.communicated)})
    chosen = by_length[(len(by_length) - 1) // 2]
    step, (start, end) = steps[chosen], spans[chosen]
    talk = [each for each in trace.communicated if each.place.step == step]
    ends = [each for each in talk if each.place.part not in _PASSES]
    passes = [each for each in talk if each.place.part in _PASSES]
    have = max((e.place.micro_batch for e in trace.computed if e.place.step == step), default=0)
    count = micro_batches or (have if have > 1 else USUAL_MICRO_BATCHES)
    length = end - start
    if not have:
        exposed, lane = exposed_in(trace, talk), _busiest(_lanes(talk))
        most = max(0, length - max(length - exposed, lane))
        ways = (Gain(TWO_STRANDS, most, None), Gain(DECOMPOSITION, 0, None), Gain(BOTH, most, None))
        name = trace.steps[step].name
        why = "the trace does not say what is backward: it has no operators of autograd"
        return Gains(trace.rank, name, 0, count, length, exposed, None, ways, why)
    world = _Step(trace, step, have, count, length, passes, ends)
    return world.gains()


class _Step:
    """One step, with another number of micro-batches than it had."""

    def __init__(
        self,
        trace: RankTrace,
        step: int,
        have: int,
        count: int,
        length_ns: int,
        passes: list[Communicated],
        ends: list[Communicated],
    ) -> None:
        self.trace, self.step, self.have, self.count = trace, step, have, count
        times = busy_times(trace, step)
        computed = [trace.computed[i].place.part in _PASSES for i in times]
        in_passes = sum(ns for ns, own in zip(times.values(), computed, strict=True) if own)
        exposed, at_end = exposed_in(trace, passes), exposed_in(trace, ends)
        self.passes_ns = in_passes + exposed
        self.rest_ns = max(0, length_ns - self.passes_ns)
        scale = count / have
        self.step_ns = round(self.rest_ns + scale * self.passes_ns)
        self.in_passes_ns = round(scale * exposed)
        self.exposed_ns = self.in_passes_ns + at_end
        lanes = _lanes(ends)
        for lane, ns in _lanes(passes).items():
            lanes[lane] += round(scale * ns)
        self.lane_ns = _busiest(lanes)
        first = _passes(trace, step, have // 2 + 1, times)
        samples = _OPERATORS // max(1, sum(len(each.graph.operators) for each in first))
        numbers = _spread(have, max(1, min(_SAMPLES, samples)))
        self.samples = [_passes(trace, step, number, times) for number in numbers]

    def gains(self) -> Gains:
        limit = max(0, self.step_ns - max(self.step_ns - self.exposed_ns, self.lane_ns))
        strands = min(limit, self.in_passes_ns * (self.count - 1) // self.count)
        cut_samples = sum(most_ns(each) for sample in self.samples for each in sample)
        cut = self.count * cut_samples // len(self.samples)
        bounds = {TWO_STRANDS: strands, DECOMPOSITION: min(cut, self.exposed_ns), BOTH: limit}
        lengths = [_lengths(*sample, self.count) for sample in self.samples]
        simulated = {way: mean(each[way] for each in lengths) for way in (*bounds, _AS_TRACED)}
        one = simulated[_AS_TRACED]
        passes = self.passes_ns * self.count / self.have
        ways = tuple(
            Gain(way, most, min(most, max(0, round(passes * (1 - simulated[way] / one)))))
            for way, most in bounds.items()
        )
        return Gains(
            rank=self.trace.rank,
            step=self.trace.steps[self.step].name,
            traced_micro_batches=self.have,
            micro_batches=self.count,
            step_ns=self.step_ns,
            exposed_ns=self.exposed_ns,
            replayed_over_measured=one * self.have / self.passes_ns if self.passes_ns else None,
            ways=ways,
        )


def _passes(
    trace: RankTrace, step: int, number: int, times: Mapping[int, int]
) -> tuple[PassGraph, PassGraph]:
    """Forward and backward of one micro-batch."""
    forward, backward = (pass_graph(trace, step, part, number, times) for part in _PASSES)
    return forward, backward


def _spread(have: int, most: int) -> list[int]:
    """Numbers of the micro-batches that are simulated: all, or `most` at equal distances."""
    count = min(have, most)
    return [1 + (2 * i + 1) * have // (2 * count) for i in range(count)]


def _lengths(forward: PassGraph, backward: PassGraph, count: int) -> dict[str, float]:
    """Simulated length of the passes of one micro-batch, on average over a step of `count`, by way,
    and in the order of the trace."""
    alone = _length(forward, _given) + _length(backward, _given)
    cut = (decomposed(forward), decomposed(backward))
    sites = bool(forward.sites or backward.sites)
    cut_alone = alone
    if sites:
        cut_alone = min(alone, sum(_length(each, order_list) for each in cut))
    found: dict[str, float] = {_AS_TRACED: alone, TWO_STRANDS: alone}
    found |= {DECOMPOSITION: cut_alone, BOTH: cut_alone}
    if count < 2:
        return found
    pair = min(alone, _length(_pair(forward, backward), order_list))
    cut_pair = min(pair, _length(_pair(*cut), order_list)) if sites else pair
    found[TWO_STRANDS] = (alone + (count - 1) * pair) / count
    found[BOTH] = (cut_alone + (count - 1) * min(cut_pair, cut_alone)) / count
    return found


def _pair(forward: PassGraph, backward: PassGraph) -> PassGraph:
    strands = {"forward": forward, "backward": backward}
    graph = merge("pair", {name: each.graph for name, each in strands.items()})
    solo = {f"{n}.{op}": ns for n, each in strands.items() for op, ns in each.solo_ns.items()}
    return PassGraph(graph, solo, ())


def _given(problem: Problem) -> tuple[str, ...]:
    return problem.graph.order


def _length(passes: PassGraph, order: Callable[[Problem], tuple[str, ...]]) -> int:
    """Length of a pass in an order, ns; at least 1."""
    world = Evaluator(passes.graph, passes.solo_ns, 0)
    return max(1, world.length_ns(order(Problem(passes.graph, passes.solo_ns))))


def _lanes(talk: Iterable[Communicated]) -> Counter[str]:
    """By lane, the time in which it is busy."""
    by_lane: dict[str, list[sets.Interval]] = {}
    for each in talk:
        by_lane.setdefault(each.lane, []).append((each.start_ns, each.end_ns))
    return Counter({lane: sets.length(sets.union(own)) for lane, own in by_lane.items()})


def _busiest(lanes: Counter[str]) -> int:
    return max(lanes.values(), default=0)
