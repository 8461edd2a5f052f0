"""Barrier-free search: best merge of the strands' main chains and fillers, then polish.

    1. split    each strand into a main chain and fillers (`chains`)
    2. merge    both by dynamic programming over the chains' progress (`merge_chains`)
    3. polish   the best order by moving operators (`polish`)

List schedules and the published pairing compete, so the result is never longer than theirs. Small
problems are solved to proven optimality instead (`optimal`). Larger ones come with the certified
lower bound of `bounds`, so the gap to the optimum is known.

A last round of moves lowers the peak as far as the order gets no longer. If it is then above the
memory bound, merges in which one strand waits for the other compete with the order of the lowest
peak, and polishing first brings an order below the bound.
"""

from collections.abc import Iterator, Sequence

from interlace.search.bounds import lower_bound_ns
from interlace.search.chains import split
from interlace.search.evaluator import Evaluator
from interlace.search.job_memory import Room
from interlace.search.list_scheduling import order_list
from interlace.search.memory import Liveness, liveness, peak_of
from interlace.search.merge_chains import merge_chains
from interlace.search.optimal import order_optimal
from interlace.search.polish import lower_peak, polish
from interlace.search.problem import Problem
from interlace.search.segment_pairs import order_segment_pairs
from interlace.search.tight import lowest

CUTS = ((0.25, 32), (0.5, 32), (1.0, 32))
"""(longest piece as a share of the longest collective, states kept): how often strands may take
turns. A choice: more states find shorter orders and take longer."""
NARROW_CUT = (0.5, 16)
"""The same for `order_quick`: the second cut with half the states, for speed."""
MANY = 1000
"""Operators beyond which a problem is merged once, with the second cut, and where memory is tight
the best merge within the bound is taken as it is; a choice that bounds the time of a search."""
NEAR_BOUND = 1.001
"""How many times as long as the certified bound the order of more than `MANY` operators may be
without being polished; a choice: times vary by more than a thousandth from step to step."""
STATES = 4000
"""Operators beyond which a problem is merged with fewer states kept, down in proportion; a choice
that bounds the time of a search."""
REACH = 8
"""Pieces by which one chain may have run more than the other's share of work; a choice, about one
layer."""
EVALUATIONS = 3_000_000
"""Polishing budget in operators simulated; a choice, about a second of one core."""
PER_OPERATOR = 1_200
"""Budget of a small problem, in operators simulated for each of its own; a choice."""
SLACKS = (1.01, 1.02, 1.04, 1.08)
"""How many times as long as the shortest an order may get to need less memory; a choice, the least
first."""
PARTS = 16
"""Parts of the budget of more than `MANY` operators after each of which a search goes on only if
its pace promises something. A choice; of 80 layers, all but the first part gave nothing."""
PEAK_SHARE = 0.25
"""Part of the budget that is spent on a lower peak; a choice."""


def order_merge(problem: Problem, rivals: Sequence[tuple[str, ...]] = ()) -> tuple[str, ...]:
    """The shortest order found that respects the memory bound; if there is none, the one with the
    lowest peak. `rivals` are the orders of `list` and `segment_pairs` if they are known."""
    return _Search(problem, rivals).run()


def order_quick(problem: Problem) -> tuple[str, ...] | None:
    """A good order, found some ten times faster, by a narrower merge alone; None if that finds
    none within the memory bound."""
    world = Evaluator(problem.graph, problem.solo_ns, problem.issue_ns)
    values = liveness(problem.graph)
    bound = problem.memory_bytes
    candidates = _merged(problem, world, *NARROW_CUT, values if bound else None)
    candidates.append(list(range(len(world.names))))
    fitting = [o for o in candidates if not bound or peak_of(values, o) <= bound]
    return world.order(min(fitting, key=lambda o: world.length(o)[0])) if fitting else None


def _merged(
    problem: Problem, world: Evaluator, cut: float, width: int, values: Liveness | None = None
) -> list[list[int]]:
    """The merge of two chains, within the memory bound if `values` are given; nothing if none is
    found, if there are more chains, or if nothing is communicated."""
    longest = max((problem.solo_ns[op.id] for op in problem.graph.collectives), default=0)
    chains = split(problem, int(cut * longest))
    if not longest or len(chains) > 2:
        return []
    lanes = problem.graph.lanes[1:]
    room = Room.within(problem.memory_bytes, chains, values) if values else None
    merged = merge_chains(chains, lanes, width=width, reach=REACH, room=room)
    return [world.numbers(merged[0])] if merged else []


class _Search:
    def __init__(self, problem: Problem, rivals: Sequence[tuple[str, ...]]) -> None:
        self.problem = problem
        self.rivals = rivals or (order_segment_pairs(problem).order, order_list(problem))
        self.bound = problem.memory_bytes
        self.world = Evaluator(problem.graph, problem.solo_ns, problem.issue_ns)
        self.values = liveness(problem.graph)
        self.few = len(self.world.names) <= MANY
        self.least = lower_bound_ns(problem)
        self.budget = min(EVALUATIONS, PER_OPERATOR * len(self.world.names))

    def run(self) -> tuple[str, ...]:
        best = self._best_candidate()
        if self.few or self._fits(best):
            best = self._improved(best, bound=0)
        if not self._fits(best):
            found = [order for order in self._tight(best) if self._fits(order)]
            if found:
                best = self._improved(min(found, key=self._length), bound=self.bound)
            else:
                best = lowest(self.problem, self.world, self.values)
        return self.world.order(best)

    def _length(self, order: Sequence[int]) -> int:
        return self.world.length(order)[0]

    def _fits(self, order: Sequence[int]) -> bool:
        return not self.bound or peak_of(self.values, order) <= self.bound

    def _best_candidate(self) -> list[int]:
        found = [self.world.numbers(order) for order in self.rivals]
        if min(map(self._length, found)) > self.least:
            found += self._merges()
        return min(found, key=self._length)

    def _tight(self, order: list[int]) -> Iterator[list[int]]:
        """Merges within the bound; `order` brought below it, a little longer or as long as it
        takes; and the order of the lowest peak."""
        merged = self._merges(self.values)
        yield from merged
        if self.few:
            for slack in SLACKS:
                yield self._lowered(order, int(slack * self._length(order)))
        if self.few or not merged:
            yield self._polished(order, self.bound)
            yield lowest(self.problem, self.world, self.values)

    def _lowered(self, order: list[int], longest_ns: int) -> list[int]:
        spare = int(PEAK_SHARE * self.budget)
        return lower_peak(
            self.world, order, self.values, evaluations=spare, longest_ns=longest_ns,
            part=0 if self.few else spare // PARTS,
        )  # fmt: skip

    def _merges(self, values: Liveness | None = None) -> list[list[int]]:
        cuts = CUTS if self.few else CUTS[1:2]
        share = min(1.0, STATES / len(self.world.names))
        return [
            order
            for cut, width in cuts
            for order in _merged(self.problem, self.world, cut, int(share * width), values)
        ]

    def _polished(self, order: list[int], bound: int) -> list[int]:
        values = self.values if bound else None
        return polish(
            self.world, order, evaluations=self.budget, values=values, bound=bound,
            part=0 if self.few else self.budget // PARTS,
        )  # fmt: skip

    def _improved(self, order: list[int], bound: int) -> list[int]:
        """An order that fits, made shorter if that is possible, then with a lower peak."""
        values = self.values if bound else None
        if self._length(order) > self.least * (1.0 if self.few else NEAR_BOUND):
            proven = order_optimal(self.world, order, values=values, bound=bound)
            order = proven if proven is not None else self._polished(order, bound)
        return self._lowered(order, self._length(order))
