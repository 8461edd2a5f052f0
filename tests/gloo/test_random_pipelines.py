"""1,000 small random schedules that the verifier accepts, on real processes: each runs to its end
with the right values. Of those drawn between them that it says would never end, some are started as
well, and do not come to that.

Messages meet by their order alone, so a schedule that would never end may also go on with a message
that was meant for something else, and fail there.

What runs is the executor's own loop over sends, receives and actions, with receives posted early,
and its link over gloo. Only the graphs are replaced: a pass makes integers that say what it read.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks

from interlace.errors import InputError
from interlace.graphs.parts import SAVED
from interlace.graphs.trace import Binding
from interlace.ir.actions import (
    Action,
    Direction,
    Share,
    Slot,
    backward,
    forward,
    input_gradient,
    together,
    weight_gradient,
)
from interlace.ir.stage_messages import Edge, Item, Receive, Send, Wiring, chain
from interlace.runtime.handovers import Carried, Handovers
from interlace.runtime.joint_end import Unended
from interlace.runtime.pipeline_executor import _EARLY, _PipelineRun
from interlace.runtime.stage_link import StageLink
from interlace.schedules.finder import find, names
from interlace.schedules.sends_receives import (
    check_messages,
    with_early_receives,
    with_messages,
)
from interlace.schedules.verify import check_ranks, pass_of

PIPELINES = [name for name in names() if name not in ("two_strand", "one_strand")]
RUN_ANYWAY = 6
"""Schedules of each world that would never end, and are started all the same."""
SIZE = 3
"""Numbers in a message. All have the same size: gloo ends a process that gets a longer one."""
NODE: Any = SimpleNamespace(meta={"val": torch.empty(SIZE, dtype=torch.int64)})
Lists = list[list[Action]]


def drawn(ranks: int, draw: random.Random) -> tuple[Lists, int, int, tuple[Edge, ...]]:
    """(actions of all ranks, chunks, micro-batches, edges) of a sound schedule: one of ours, or any
    order of any placement."""
    count = draw.randint(1, 4)
    if draw.random() < 0.4:
        schedule = find(draw.choice(PIPELINES))
        chunks = ranks * schedule.chunks
        found = [list(each) for each in schedule.of_ranks(ranks, count)]
    else:
        chunks = ranks * draw.randint(1, 2)
        found = any_order(ranks, chunks, count, draw)
    edges = chain(chunks)
    if chunks > 2 and draw.random() < 0.5:
        first = draw.randrange(chunks - 2)
        edges = (*edges, (first, draw.randrange(first + 2, chunks)))
    return found, chunks, count, edges


def any_order(ranks: int, chunks: int, count: int, draw: random.Random) -> Lists:
    """Passes in any order that the chain of chunks allows, each chunk on any rank."""
    home = [*range(ranks), *(draw.randrange(ranks) for _ in range(chunks - ranks))]
    draw.shuffle(home)
    halves = draw.random() < 0.5
    left = [("F", c, m) for c in range(chunks) for m in range(1, count + 1)]
    left += [(w, c, m) for _, c, m in left for w in ("IW" if halves else "B")]
    first = "I" if halves else "B"
    done: set[tuple[str, int, int]] = set()
    found: Lists = [[] for _ in range(ranks)]

    def needs(way: str, c: int, m: int) -> list[tuple[str, int, int]]:
        if way == "F":
            return [("F", c - 1, m)] if c else []
        before = [(way, c, m - 1)] if m > 1 and way != "I" else []
        if way == "W":
            return [("I", c, m), *before]
        return [("F", chunks - 1, m), ("F", c, m), *before] + (
            [(first, c + 1, m)] if c + 1 < chunks else []
        )

    while left:
        each = draw.choice([one for one in left if done.issuperset(needs(*one))])
        left.remove(each)
        done.add(each)
        make = {"F": forward, "B": backward, "I": input_gradient, "W": weight_gradient}[each[0]]
        found[home[each[1]]].append(together(make(each[2], each[1])))
    return found


def changed(lists: Lists, draw: random.Random) -> Lists:
    """The lists with one change, or none."""
    found = [list(each) for each in lists]
    own = draw.choice([each for each in found if each])
    at, other = draw.randrange(len(own)), draw.randrange(len(own))
    kinds = {"none": 5, "neighbours": 4, "swap": 3, "drop": 1, "duplicate": 1, "number": 1}
    kinds["rank"] = 1
    (kind,) = draw.choices(list(kinds), list(kinds.values()))
    if kind == "drop":
        del own[at]
    elif kind == "duplicate":
        own.insert(other, own[at])
    elif kind == "neighbours":
        own[at : at + 2] = reversed(own[at : at + 2])
    elif kind == "swap":
        own[at], own[other] = own[other], own[at]
    elif kind == "number":
        first, *others = own[at].slots
        by = draw.choice([-1, 1])
        own[at] = Action((replace(first, micro_batch=first.micro_batch + by), *others))
    elif kind == "rank":
        draw.choice(found).append(own.pop(at))
    return found


def verified(lists: Lists, chunks: int, count: int, edges: tuple[Edge, ...]) -> Any:
    """The lists with messages, or why the verifier refuses them."""
    try:
        check_ranks(lists, micro_batches=count, chunks=chunks, name="drawn", edges=edges)
        found = with_messages(lists, edges)
        check_messages(found, edges=edges, name="drawn")
    except InputError as error:
        return error.message
    return found


def at_its_action(actions: Sequence[Action], wiring: Wiring) -> list[Item]:
    """A rank's list with each message at the action that needs it or makes it."""
    items: list[Item] = []
    for each in actions:
        items += [Receive(m, wiring.rank_of[m.source]) for m in wiring.needed(each)]
        items.append(each)
        items += [Send(m, wiring.rank_of[m.to]) for m in wiring.sent(each)]
    return items


class IntegerRun(_PipelineRun):
    """The executor's run with integers in the place of graphs."""

    def __init__(self, link: StageLink, lists: Lists, count: int, edges: tuple[Edge, ...]) -> None:
        wiring = Wiring(lists, edges)
        self.rank_of, self.edges = wiring.rank_of, edges
        across = [(s, t) for s, t in edges if self.rank_of[s] != self.rank_of[t]]
        ways = [(Direction.FORWARD, s, t) for s, t in across]
        ways += [(Direction.BACKWARD, t, s) for s, t in across]
        ends = [(Direction.FORWARD, s, t) for s, t in edges]
        ends += [(Direction.BACKWARD, t, s) for s, t in edges]
        handovers = Handovers(
            rank=link.rank, rank_of=tuple(rank for _, rank in sorted(self.rank_of.items())),
            edges=edges, owners={}, readers={}, traced=cast("Any", None),
            messages={way: (Carried(binding(*way[:2]), NODE),) for way in ways},
        )  # fmt: skip
        here = {binding(way, s) for way, s, t in ends if self.rank_of[t] == link.rank}
        executor: Any = SimpleNamespace(
            link=link, watch=None, handovers=handovers, passes=lambda count: Counter(),
            readers={each: frozenset({"here"}) for each in here}, lists=lambda count: lists,
        )  # fmt: skip
        super().__init__(executor, [()] * count, None, wiring)
        self.made: dict[tuple[str, int, int], int] = {}
        self.sums: dict[int, list[int]] = {}

    def action(self, action: Action) -> None:
        """Make the integers of its passes, from those that it is handed."""
        for slot in action.slots:
            self._pass(slot)

    def _pass(self, slot: Slot) -> None:
        letter, c, m = pass_of(slot)
        if letter in "BW":
            self.sums.setdefault(c, []).append(m)
        if slot.strand.share == Share.WEIGHT:
            return
        way = slot.strand.direction
        forwards = way == Direction.FORWARD
        ends = self.edges if forwards else [(t, s) for s, t in self.edges]
        read = [int(self.handed[m, binding(way, s)][0]) for s, t in ends if t == c]
        own = 0 if forwards else self.made["F", c, m]
        self.made["F" if forwards else "B", c, m] = value = made_of(own, c, m, read)
        if any(s == c for s, _ in ends):
            self.handed[m, binding(way, c)] = torch.full((SIZE,), value)


def made_of(own: int, c: int, m: int, read: Sequence[int]) -> int:
    """The integer that a pass makes."""
    return (own * 7 + c * 1009 + m + 31 * sum(read)) % 1_000_003


def right(c: int, m: int, chunks: int, edges: Sequence[Edge], way: str) -> int:
    """The same, by definition."""
    if way == "F":
        return made_of(0, c, m, [right(s, m, chunks, edges, "F") for s, t in edges if t == c])
    read = [right(t, m, chunks, edges, "B") for s, t in edges if s == c]
    return made_of(right(c, m, chunks, edges, "F"), c, m, read)


def binding(way: Direction, chunk: int) -> Binding:
    return Binding(SAVED, f"{way} {chunk}")


def ran(
    link: StageLink, lists: Lists, items: Sequence[Item], count: int, edges: tuple[Edge, ...]
) -> bool:
    """Run the list of this rank; whether all that it made is right, and nothing is left."""
    run = IntegerRun(link, lists, count, edges)
    with link.end.for_all():
        for item in items:
            run.item(item)
        link.finish()
    chunks = len(run.rank_of)
    own = [c for c, rank in run.rank_of.items() if rank == link.rank]
    wanted = {
        (way, c, m): right(c, m, chunks, edges, way)
        for way in "FB" for c in own for m in range(1, count + 1)
    }  # fmt: skip
    in_order = all(run.sums[c] == list(range(1, count + 1)) for c in own)
    return run.made == wanted and in_order and not run._arrivals


def run_all(accepted: int, seed: int) -> dict[str, Any]:
    """A child, which draws until so many schedules were accepted, and runs them: how many were, how
    many were refused, and what did not agree."""
    found: Counter[str] = Counter()
    wrong: list[int] = []
    outcomes: list[str] = []
    with gloo_group(3600):
        link = StageLink(dist.group.WORLD, torch.device("cpu"), wait_s=60)
        endless = []
        for case in itertools.count():
            if found["accepted"] == accepted:
                break
            draw = random.Random(seed * 100_000 + case)
            lists, chunks, count, edges = drawn(link.ranks, draw)
            lists = changed(lists, draw)
            items = verified(lists, chunks, count, edges)
            if isinstance(items, str):
                found["endless" if "would never end" in items else "refused"] += 1
                if "would never end" in items:
                    endless.append((lists, count, edges))
                continue
            found["accepted"] += 1
            early = with_early_receives(items[link.rank], _EARLY)
            if not ran(link, lists, early, count, edges):
                wrong.append(case)
        for lists, count, edges in endless[:RUN_ANYWAY]:
            short = StageLink(dist.new_group(), torch.device("cpu"), wait_s=0.5)
            own = at_its_action(lists[short.rank], Wiring(lists, edges))
            try:
                outcomes.append("right" if ran(short, lists, own, count, edges) else "wrong")
            except (Unended, KeyError) as error:
                outcomes.append(type(error).__name__)
            link.meet("the end of a schedule that cannot come to its end on all ranks")
    return {"counts": dict(found), "wrong": wrong, "outcomes": outcomes}


def test_a_thousand_random_schedules() -> None:
    """800 on two ranks and 200 on three; and those that would never end."""
    for ranks, accepted in ((2, 800), (3, 200)):
        args = [accepted, ranks]
        results = run_ranks("test_random_pipelines:run_all", ranks, args=args, timeout_s=120)
        found = [result.value for result in results]
        counts = found[0]["counts"]
        assert [each["wrong"] for each in found] == [[]] * ranks
        assert counts["accepted"] == accepted
        assert counts["refused"] > accepted // 10, counts
        of_ranks = list(zip(*(each["outcomes"] for each in found), strict=True))
        assert len(of_ranks) == min(RUN_ANYWAY, counts["endless"]) > 1
        assert all(set(each) != {"right"} for each in of_ranks), of_ranks
        assert any("Unended" in each for each in of_ranks), of_ranks
