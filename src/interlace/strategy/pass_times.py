"""Times of passes through chunks of a model, alone and two side by side, by simulation.

A pass through a few layers is simulated operator by operator (`sim.lanes`), with contention; two
passes side by side run in the order that the planner finds for them (`search.planner`), as training
would, with the head, if there is one, behind both. Layers are alike, so a pass through more of them
is that through `MORE` and, for each further one, the growth from `FEW` to `MORE`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from interlace.ir.actions import Direction, Share, Slot
from interlace.ir.graph import OpGraph
from interlace.ir.phases import phase_graph
from interlace.ir.timeline import Timeline
from interlace.search.planner import Search, plan_phase
from interlace.search.problem import Problem
from interlace.sim.lanes import simulate
from interlace.strategy.layer_operators import LayerOperators
from interlace.strategy.timed_graph import TimedGraph

FEW, MORE = 1, 3
"""Layers that are simulated: a choice. The first and the last of them have no neighbour."""


@dataclass(frozen=True, slots=True)
class PassCost:
    """What an action of a rank takes, in ns."""

    ns: float
    exposed: Mapping[str, float]
    """By lane: time in which the rank waits for its collectives."""
    communication: Mapping[str, float]
    """By lane: time in which it carries something."""

    def __add__(self, other: "PassCost") -> "PassCost":
        return self.plus(other, 1.0)

    def plus(self, other: "PassCost", times: float) -> "PassCost":
        """And so many of `other`; fewer than none may not be left."""
        return PassCost(
            self.ns + times * other.ns,
            _summed(self.exposed, other.exposed, times),
            _summed(self.communication, other.communication, times),
        )


NOTHING = PassCost(0.0, {}, {})


@dataclass(frozen=True, slots=True, order=True)
class ChunkShape:
    """What of a model a chunk has."""

    layers: int
    head: bool
    dense: int = 0
    """Of a model with experts, how many of the layers, the first ones, have none."""

    @property
    def parts(self) -> tuple["ChunkShape", ...]:
        """What has layers of one kind only: those without experts, then the rest with the head."""
        if self.dense in (0, self.layers):
            return (self,)
        rest = ChunkShape(self.layers - self.dense, self.head)
        return ChunkShape(self.dense, False, self.dense), rest

    def of(self, layers: int, head: bool) -> "ChunkShape":
        """So many layers of its one kind."""
        return ChunkShape(layers, head, layers if self.dense else 0)


_Pass = tuple[Direction, Share, ChunkShape]


@dataclass
class PassTimes:
    """Times of the passes of one job's chunks; each is simulated once."""

    operators: LayerOperators
    side_by_side: bool = True
    """Whether two passes of an action run interleaved, or one after the other."""
    searches: tuple[str | Search, ...] = ("merge",)
    """What finds their order; of several that with the shortest simulation."""
    barrier_ns: int = 0
    """What the host takes behind each barrier, if that search sets some."""
    _found: dict[tuple[_Pass, ...], PassCost] = field(default_factory=dict)
    _timelines: dict[tuple[_Pass, ...], Timeline] = field(default_factory=dict)

    def of(self, slots: tuple[Slot, ...], shapes: Mapping[int, ChunkShape]) -> PassCost:
        """Of an action's slots, whose chunks have these shapes."""
        passes = tuple(
            (each.strand.direction, each.strand.share, shapes[each.strand.chunk or 0])
            for each in slots
        )
        return self.of_passes(passes)

    def of_passes(self, passes: tuple[_Pass, ...]) -> PassCost:
        """The same of passes."""
        if passes not in self._found:
            self._found[passes] = self._time(passes)
        return self._found[passes]

    def shown(self, slots: tuple[Slot, ...], shapes: Mapping[int, ChunkShape]) -> Timeline:
        """The operators of an action, for a picture or a trace: of `MORE` layers at most."""
        passes = tuple(
            (e.strand.direction, e.strand.share, shapes[e.strand.chunk or 0]) for e in slots
        )
        passes = tuple((way, share, shape.parts[-1]) for way, share, shape in passes)
        layers = min(MORE, *(shape.layers for _, _, shape in passes))
        alone = len(passes) == 1
        return self._simulated(tuple((d, s, c.of(layers, c.head and alone)) for d, s, c in passes))

    @cached_property
    def _whole(self) -> "PassTimes":
        return PassTimes(self.operators.whole, self.side_by_side, self.searches, self.barrier_ns)

    def _time(self, passes: tuple[_Pass, ...]) -> PassCost:
        if len(passes) == 2 and self.operators.links.layout.decompose == "auto":
            # Beside another strand `auto` may leave collectives whole, and cut those of the ends.
            return min(self._sides(passes), self._whole._sides(passes), key=lambda cost: cost.ns)
        return self._sides(passes)

    def _sides(self, passes: tuple[_Pass, ...]) -> PassCost:
        parts = [[(d, s, part) for part in shape.parts] for d, s, shape in passes]
        if len(passes) != 2 or not self.side_by_side or _same_way(passes):
            return sum((self._alone(part) for each in parts for part in each), NOTHING)
        # Layers without experts run beside such, and those with beside those with.
        found, alike = NOTHING, dict[bool, list[_Pass]]()
        for part in chain(*parts):
            alike.setdefault(part[2].dense > 0, []).append(part)
        for each in alike.values():
            found += self._pair(*each) if len(each) == 2 else self._alone(*each)
        return found

    def _pair(self, *passes: _Pass) -> PassCost:
        """Two passes side by side, through layers of one kind."""
        least = min(shape.layers for _, _, shape in passes)
        both = tuple((way, share, shape.of(least, head=False)) for way, share, shape in passes)
        found = self._grown(both, least)
        for one, less in zip(passes, both, strict=True):
            if one != less:  # a head, and layers with none beside them
                found = found.plus(self._alone(one), 1.0).plus(self._alone(less), -1.0)
        return found

    def _alone(self, one: _Pass) -> PassCost:
        if (one,) not in self._found:
            self._found[one,] = self._grown((one,), one[2].layers)
        return self._found[one,]

    def _grown(self, passes: tuple[_Pass, ...], layers: int) -> PassCost:
        def of(count: int) -> PassCost:
            shaped = tuple((d, s, shape.of(count, shape.head)) for d, s, shape in passes)
            return _measured(self._simulated(shaped))

        if layers <= MORE:
            return of(layers)
        few, more = of(FEW), of(MORE)
        growth = (layers - MORE) / (MORE - FEW)
        return more.plus(more.plus(few, -1.0), growth)

    def _simulated(self, passes: tuple[_Pass, ...]) -> Timeline:
        if passes not in self._timelines:
            self._timelines[passes] = self._simulate(passes)
        return self._timelines[passes]

    def _simulate(self, passes: tuple[_Pass, ...]) -> Timeline:
        graphs = {
            str(direction): (self.operators.dense if shape.dense else self.operators).pass_graph(
                direction, share, shape.layers, head=shape.head
            )
            for direction, share, shape in passes
        }
        contention = self.operators.links.contention
        if len(graphs) == 1:
            timed = next(iter(graphs.values()))
            graph = timed.graph
            return simulate(graph, graph.order, timed.solo_ns, contention=contention)
        graph = _beside(graphs)
        solo = {f"{n}.{op}": ns for n, timed in graphs.items() for op, ns in timed.solo_ns.items()}
        problem = Problem(graph, solo, contention=contention)
        orders = [plan_phase(problem, search) for search in self.searches]
        timelines = [
            simulate(
                graph,
                each.order,
                solo,
                contention=contention,
                barriers=each.barriers,
                barrier_ns=self.barrier_ns,
            )
            for each in orders
        ]
        return min(timelines, key=lambda timeline: timeline.length_ns)


def _beside(graphs: Mapping[str, TimedGraph]) -> OpGraph:
    return phase_graph("+".join(graphs), {name: each.graph for name, each in graphs.items()}, 0)


def _same_way(passes: tuple[_Pass, ...]) -> bool:
    return passes[0][0] == passes[1][0]


def _measured(timeline: Timeline) -> PassCost:
    exposed: dict[str, float] = {}
    busy: dict[str, float] = {}
    for row in timeline.collective_rows():
        exposed[row.lane] = exposed.get(row.lane, 0.0) + row.exposed_ns
        busy[row.lane] = busy.get(row.lane, 0.0) + row.busy_ns
    return PassCost(float(timeline.length_ns), exposed, busy)


def _summed(
    first: Mapping[str, float], second: Mapping[str, float], times: float
) -> dict[str, float]:
    return {
        lane: max(0.0, first.get(lane, 0.0) + times * second.get(lane, 0.0))
        for lane in sorted({*first, *second})
    }
