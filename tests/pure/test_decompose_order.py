"""The order of decomposed collectives, on all ranks at once and without any transfer."""

from collections import defaultdict, deque

from hypothesis import given
from hypothesis import strategies as st

from interlace.decompose.order import VARIANTS, Hop, Order, cut


@st.composite
def orders(draw: st.DrawFn) -> list[Order]:
    """The orders of all ranks of one group; slices may be uneven, or empty."""
    ranks = draw(st.integers(1, 8))
    rows = tuple(draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks)))
    variant, pieces = draw(st.sampled_from(VARIANTS)), draw(st.integers(1, 4))
    return [Order(variant=variant, rank=r, rows=rows, pieces=pieces) for r in range(ranks)]


def visits(order: Order) -> list[tuple[int, int, int]]:
    """(step, piece, lane) as the loops go."""
    lanes = range(len(order.directions))
    return [
        (step, piece, lane)
        for step in range(order.ranks)
        for piece in range(order.pieces)
        for lane in lanes
    ]


@given(st.integers(0, 50), st.integers(1, 9))
def test_cut_covers_all_rows_evenly(rows: int, parts: int) -> None:
    """Parts are adjacent, cover everything, and differ by one row at most."""
    found = cut(rows, parts)
    assert [p.start for p in found] == [0, *(p.stop for p in found[:-1])]
    assert found[-1].stop == rows
    assert max(p.rows for p in found) - min(p.rows for p in found) <= 1


@given(orders())
def test_every_rank_visits_every_row_once(group: list[Order]) -> None:
    """A gather starts with the own slice, a scatter ends with it, and no row is left out."""
    for order in group:
        own = set(range(*order.own))
        for visit, own_step in ((order.gathered, 0), (order.scattered, order.ranks - 1)):
            seen: list[int] = []
            for step, piece, lane in visits(order):
                part = visit(step, lane, piece)
                assert part.rows <= order.longest
                assert (step == own_step) == set(range(*part)).issubset(own) or not part.rows
                seen += range(*part)
            assert sorted(seen) == list(range(order.total))


@given(orders())
def test_gather_messages_are_what_the_receiver_visits_next(group: list[Order]) -> None:
    """With messages between two ranks matched first come, first served, each one holds the part
    that its receiver takes it for, and the sender has it by then."""
    queues: dict[Hop, deque[object]] = defaultdict(deque)
    for order in group:
        for step, piece, lane in visits(order):
            if step < order.ranks - 1:
                sent = order.gathered(0 if order.straight else step, lane, piece)
                queues[Hop(order.hop(step, lane).to, order.rank)].append(sent)
    for order in group:
        for step, piece, lane in visits(order):
            if step < order.ranks - 1:
                expected = order.gathered(step + 1, lane, piece)
                source = order.hop(step, lane).source
                assert queues[Hop(order.rank, source)].popleft() == expected
    assert not any(queues.values())


@given(orders())
def test_scatter_sums_every_rank_once_at_the_owner(group: list[Order]) -> None:
    """Partial sums, as sets of the ranks in them, end at their owner with all ranks in them."""
    ranks, totals = len(group), defaultdict(list)
    queues: dict[Hop, deque[tuple[object, list[int]]]] = defaultdict(deque)
    for step in range(ranks):
        for order in group:
            for _, piece, lane in (v for v in visits(order) if v[0] == step):
                part, held = order.scattered(step, lane, piece), [order.rank]
                mine = order.part(order.rank, order.index(lane, piece))
                total = totals[order.rank, lane, piece]
                if step > 0:
                    source = order.hop(step - 1, lane).source
                    arrived, of_ranks = queues[Hop(order.rank, source)].popleft()
                    assert arrived == (mine if order.straight else part)
                    (total if order.straight else held).extend(of_ranks)
                if step == ranks - 1:
                    assert part == mine
                    total += held
        for order in group:
            for _, piece, lane in (v for v in visits(order) if v[0] == step < ranks - 1):
                part, hop = order.scattered(step, lane, piece), order.hop(step, lane)
                of_ranks = [order.rank] if order.straight else _summed(order, step, lane, ranks)
                queues[Hop(hop.to, order.rank)].append((part, of_ranks))
    assert all(sorted(found) == list(range(ranks)) for found in totals.values())
    assert len(totals) == ranks * group[0].parts


def _summed(order: Order, step: int, lane: int, ranks: int) -> list[int]:
    """The ranks that a ring's partial sum has passed when this rank passes it on."""
    return [(order.rank - order.directions[lane] * i) % ranks for i in range(step + 1)]
