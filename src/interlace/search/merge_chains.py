"""Merge two chains into one order by dynamic programming over how far each has come.

State at (i, j), i pieces of the first chain and j of the second issued: time of the compute lane,
time at which each link is free, and end times of the collectives that later pieces still
need. Moving on issues the next piece of either chain. A state that is no earlier in any of
these times than another of the same (i, j) is dropped. With no limit on the states kept, the
result is the best merge of the two chains; `width` limits them. A piece waits for all that it
needs before it starts, so the announced length may be a little longer than the simulated one.
"""

from dataclasses import dataclass

from interlace.search.chains import Chain

Times = tuple[int, ...]


@dataclass(slots=True)
class _State:
    times: Times
    """Compute lane, links, then live collectives of the first and of the second chain."""
    parent: "_State | None"
    chain: int


@dataclass(frozen=True, slots=True)
class _Walk:
    """A chain with, for each position, which collectives are still needed from there on."""

    chain: Chain
    live: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, chain: Chain) -> "_Walk":
        last_use: dict[int, int] = {}
        for index, piece in enumerate(chain.pieces):
            for needed in piece.needs:
                last_use[needed] = index
        live = tuple(
            tuple(k for k in sorted(last_use) if k < position <= last_use[k])
            for position in range(len(chain.pieces) + 1)
        )
        return cls(chain, live)


def merge_chains(
    chains: list[Chain], lanes: tuple[str, ...], *, width: int, band: float = 1.0
) -> tuple[tuple[str, ...], int]:
    """The best order found of all pieces' operators, and its length in ns.

    One chain is taken as it is. `lanes` are the link lanes. `band` < 1 looks only at merges in
    which the chains advance together, to within that share of their length.
    """
    walks = [_Walk.of(chain) for chain in chains]
    if len(walks) == 1:
        walks.append(_Walk.of(Chain("", ())))
    first, second = walks
    rows, columns = len(first.chain.pieces), len(second.chain.pieces)
    start = _State((0,) * (1 + len(lanes)), None, -1)
    column: list[list[_State]] = [[] for _ in range(columns + 1)]
    column[0] = [start]
    for i in range(rows + 1):
        following: list[list[_State]] = [[] for _ in range(columns + 1)]
        for j in range(columns + 1):
            if rows and columns and abs(i / rows - j / columns) > band:
                continue
            for state in column[j]:
                if i < rows:
                    times = _advance(state.times, walks, lanes, (i, j), 0)
                    _keep(following[j], _State(times, state, 0), width)
                if j < columns:
                    times = _advance(state.times, walks, lanes, (i, j), 1)
                    _keep(column[j + 1], _State(times, state, 1), width)
        if i < rows:
            column = following
    best = min(column[columns], key=lambda state: max(state.times))
    return _order(best, walks), max(best.times)


def _advance(
    times: Times, walks: list[_Walk], lanes: tuple[str, ...], position: tuple[int, int], which: int
) -> Times:
    links = 1 + len(lanes)
    walk, at = walks[which], position[which]
    piece = walk.chain.pieces[at]
    split = links + len(walks[0].live[position[0]])
    parts = [times[links:split], times[split:]]
    ends = dict(zip(walk.live[at], parts[which], strict=True))
    begin = times[0]
    for needed in piece.needs:
        begin = max(begin, ends[needed])
    now = begin + piece.compute_ns
    free = list(times[1:links])
    if piece.lane:
        lane = lanes.index(piece.lane)
        free[lane] = ends[at] = max(now, free[lane]) + piece.transfer_ns
    parts[which] = tuple(ends[k] for k in walk.live[at + 1])
    return (now + piece.issue_ns, *free, *parts[0], *parts[1])


def _keep(cell: list[_State], new: _State, width: int) -> None:
    """Add `new` unless an equal or better state is there; drop what it beats."""
    for state in cell:
        if all(a <= b for a, b in zip(state.times, new.times, strict=True)):
            return
    cell[:] = [
        state
        for state in cell
        if not all(a <= b for a, b in zip(new.times, state.times, strict=True))
    ]
    cell.append(new)
    if len(cell) > width:
        cell.sort(key=lambda state: 2 * sum(state.times[:2]) + sum(state.times[2:]))
        cell.pop()


def _order(state: _State | None, walks: list[_Walk]) -> tuple[str, ...]:
    turns = []
    while state is not None and state.parent is not None:
        turns.append(state.chain)
        state = state.parent
    position = [0, 0]
    order: list[str] = []
    for which in reversed(turns):
        order += walks[which].chain.pieces[position[which]].operators
        position[which] += 1
    return tuple(order)
