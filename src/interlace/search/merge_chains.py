"""Merge two chains and their fillers by dynamic programming over how far each chain has come.

State at (i, j), i pieces of the first chain and j of the second issued: time of the compute lane,
time at which each link is free, end times of the collectives that later pieces still need, and
how many fillers of either chain have run. The next piece of either chain may be issued, or,
where one of them would wait, the next filler. A state that is no better than another of the same
(i, j) in any of these is dropped, and of the rest the `width` most promising are kept. A piece
waits for all that it needs before it starts, so the announced length may be a little longer than
the simulated one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from interlace.search.chains import Chain
from interlace.search.job_memory import Room

LaneTimes = tuple[int, ...]
FILLER = 2
"""Turns: 0 and 1 are the chains' next pieces, 2 and 3 their next fillers."""


@dataclass(slots=True)
class _State:
    times: LaneTimes
    """Compute lane, links, then live collectives of the first and of the second chain. A time that
    has passed is given as that of the compute lane."""
    filled: tuple[int, int]
    """Fillers that have run, of either chain."""
    filler_ns: int
    """Their time."""
    parent: "_State | None"
    turn: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One piece of a chain, ready to be issued."""

    compute_ns: int
    issue_ns: int
    lane: int
    """Number of the link, or 0."""
    transfer_ns: int
    needs: tuple[int, ...]
    """Places, among the live collectives before the piece, of those that it waits for."""
    kept: tuple[int, ...]
    """For each live collective after the piece its place before it, -1 for its own."""


class _Job:
    """A chain made ready for the walk."""

    def __init__(self, chain: Chain, lanes: tuple[str, ...]) -> None:
        self.chain = chain
        self.fillers = chain.fillers
        count = len(chain.pieces)
        last_use = {k: i for i, piece in enumerate(chain.pieces) for k in piece.needs}
        for filler in chain.fillers:  # waited for by fillers alone: live to the end
            last_use |= {k: count for k in filler.needs if k not in last_use}
        live: list[int] = []
        self.live = [live]
        self.steps = []
        for index, piece in enumerate(chain.pieces):
            after = [k for k in live if last_use[k] > index]
            after += [index] if index in last_use else []
            self.steps.append(
                _Step(
                    piece.compute_ns,
                    piece.issue_ns,
                    lanes.index(piece.lane) + 1 if piece.lane else 0,
                    piece.transfer_ns,
                    tuple(live.index(k) for k in piece.needs),
                    tuple(live.index(k) if k in live else -1 for k in after),
                )
            )
            live = after
            self.live.append(live)
        compute = [piece.compute_ns + piece.issue_ns for piece in chain.pieces]
        self.left = [list(accumulate(reversed(compute), initial=0))[::-1]]
        for lane in lanes:
            times = [piece.transfer_ns if piece.lane == lane else 0 for piece in chain.pieces]
            self.left.append(list(accumulate(reversed(times), initial=0))[::-1])
        self.shares = _shares(chain)


def _shares(chain: Chain) -> list[float]:
    """Share of a chain's work that is done before each piece, and 1."""
    work = list(accumulate((p.compute_ns + p.transfer_ns for p in chain.pieces), initial=0))
    return [done / work[-1] if work[-1] else 1.0 for done in work]


def merge_chains(
    chains: Sequence[Chain],
    lanes: tuple[str, ...],
    *,
    width: int,
    reach: int | None = None,
    room: Room | None = None,
) -> tuple[tuple[str, ...], int] | None:
    """The best order found of all operators, and its length in ns.

    One chain is taken as it is. `lanes` are the link lanes. With `reach`, only merges are looked at
    in which both chains have done about the same share of their work, give or take `reach` pieces.
    With `room` only orders that keep within it; None if none was found.
    """
    pair = [_Job(chain, lanes) for chain in (*chains, Chain("", ()))[:2]]
    walk = _Merge(pair, 1 + len(lanes), width, room)
    rows, columns = (len(job.steps) for job in pair)
    middle = [bisect_left(pair[1].shares, share) for share in pair[0].shares]
    column: list[list[_State]] = [[] for _ in range(columns + 1)]
    column[0] = [_State((0,) * walk.links, (0, 0), 0, None, -1)]
    for i in range(rows + 1):
        following: list[list[_State]] = [[] for _ in range(columns + 1)]
        low, high = 0, columns
        if reach is not None:
            low = max(0, middle[i - 1] - reach) if i else 0
            high = min(columns, middle[i] + reach) if i < rows else columns
        for j in range(low, high + 1):
            walk.go_to(i, j)
            walk.fill(column[j])
            for state in column[j]:
                if i < rows and walk.has_room(state.filled, 0):
                    walk.keep(following[j], walk.advance(state, 0), (i + 1, j))
                if j < columns and walk.has_room(state.filled, 1):
                    walk.keep(column[j + 1], walk.advance(state, 1), (i, j + 1))
        if i < rows:
            column = following
    ended = [state for state in column[columns] if walk.has_room_to_end(state)]
    if not ended:
        return None
    best = min(ended, key=walk.end)
    return _order(best, pair), walk.end(best)


class _Merge:
    def __init__(self, pair: list[_Job], links: int, width: int, room: Room | None) -> None:
        self.pair = pair
        self.links = links
        self.width = width
        self.room = room
        self.filler_ns = sum(f.compute_ns for job in pair for f in job.fillers)
        self.at = (0, 0)
        self.begin = (links, links)
        """Places in `times` at which the live collectives of either chain begin."""

    def go_to(self, i: int, j: int) -> None:
        """Move to the states with i and j pieces issued."""
        self.at = (i, j)
        self.begin = (self.links, self.links + len(self.pair[0].live[i]))

    def has_room(self, count: tuple[int, int], which: int, *, filler: bool = False) -> bool:
        """Whether the next piece or filler of a chain, `count` fillers having run, keeps within the
        memory."""
        if self.room is None:
            return True
        alive = [t.alive[self.at[k]][count[k]] for k, t in enumerate(self.room.tables)]
        table = self.room.tables[which]
        if filler:
            alive[which] += table.filler[count[which]]
        else:
            alive[which] = table.piece[self.at[which]][count[which]]
        return sum(alive) <= self.room.free

    def advance(self, state: _State, which: int) -> _State:
        """Issue the next piece of a chain."""
        times, links = state.times, self.links
        step = self.pair[which].steps[self.at[which]]
        begin = self.begin[which]
        end = begin + len(self.pair[which].live[self.at[which]])
        now = times[0]
        for place in step.needs:
            now = max(now, times[begin + place])
        now += step.compute_ns
        free = list(times[1:links])
        ends = 0
        if step.lane:
            ends = free[step.lane - 1] = max(free[step.lane - 1], now) + step.transfer_ns
            now += step.issue_ns
        own = [times[begin + place] if place >= 0 else ends for place in step.kept]
        later = [*free, *times[links:begin], *own, *times[end:]]
        times = (now, *[time if time > now else now for time in later])
        return _State(times, state.filled, state.filler_ns, state, which)

    def fill(self, cell: list[_State]) -> None:
        """Add the states that running fillers gives where a chain would wait, or needs memory."""
        waiting = list(cell)
        while waiting:
            state = waiting.pop()
            if not self._may_wait(state):
                continue
            for which in (0, 1):
                filled = self._filled(state, which)
                if filled is not None and self.keep(cell, filled, self.at):
                    waiting.append(filled)

    def _may_wait(self, state: _State) -> bool:
        for which in (0, 1):
            job, at = self.pair[which], self.at[which]
            if at < len(job.steps):
                if not self.has_room(state.filled, which):
                    return True
                begin = self.begin[which]
                if any(state.times[begin + n] > state.times[0] for n in job.steps[at].needs):
                    return True
        return False

    def _filled(self, state: _State, which: int) -> _State | None:
        job, count = self.pair[which], state.filled[which]
        if count == len(job.fillers) or job.fillers[count].release > self.at[which]:
            return None
        if not self.has_room(state.filled, which, filler=True):
            return None
        filler = job.fillers[count]
        live = job.live[self.at[which]]
        now = state.times[0]
        for needed in filler.needs:
            if needed in live:
                now = max(now, state.times[self.begin[which] + live.index(needed)])
        now += filler.compute_ns
        times = (now, *[time if time > now else now for time in state.times[1:]])
        filled = (count + 1, state.filled[1]) if which == 0 else (state.filled[0], count + 1)
        return _State(times, filled, state.filler_ns + filler.compute_ns, state, FILLER + which)

    def keep(self, cell: list[_State], new: _State, at: tuple[int, int]) -> bool:
        """Add `new` unless an equal or better state is there; drop what it beats."""
        if any(_beats(state, new) for state in cell):
            return False
        cell[:] = [state for state in cell if not _beats(new, state)]
        cell.append(new)
        if len(cell) > self.width:
            worst = max(cell, key=lambda state: self._promise(state, at))
            cell.remove(worst)
            return worst is not new
        return True

    def _promise(self, state: _State, at: tuple[int, int]) -> tuple[int, int]:
        """(time before which nothing that follows can end, sum of what is known)."""
        lanes = []
        for lane in range(self.links):
            work = self.pair[0].left[lane][at[0]] + self.pair[1].left[lane][at[1]]
            lanes.append(state.times[lane] + work)
        lanes[0] += self.filler_ns - state.filler_ns
        return max(lanes), sum(lanes)

    def has_room_to_end(self, state: _State) -> bool:
        """Whether the fillers that are left keep within the memory."""
        filled = list(state.filled)
        for which in (0, 1):
            while filled[which] < len(self.pair[which].fillers):
                if not self.has_room((filled[0], filled[1]), which, filler=True):
                    return False
                filled[which] += 1
        return True

    def end(self, state: _State) -> int:
        """Length of the order if the fillers that are left run at the end."""
        now = state.times[0]
        for which in (0, 1):
            job = self.pair[which]
            live = job.live[-1]
            begin = self.links + (len(self.pair[0].live[-1]) if which else 0)
            for filler in job.fillers[state.filled[which] :]:
                ends = [state.times[begin + live.index(k)] for k in filler.needs if k in live]
                now = max([now, *ends]) + filler.compute_ns
        return max(now, *state.times)


def _beats(first: _State, second: _State) -> bool:
    """Whether `first` is at least as good in everything."""
    if first.filled[0] < second.filled[0] or first.filled[1] < second.filled[1]:
        return False
    for own, other in zip(first.times, second.times, strict=True):  # noqa: SIM110  hot
        if own > other:
            return False
    return True


def _order(last: _State, pair: list[_Job]) -> tuple[str, ...]:
    turns = []
    state: _State | None = last
    while state is not None and state.parent is not None:
        turns.append(state.turn)
        state = state.parent
    issued = [0, 0, 0, 0]
    order: list[str] = []
    for turn in reversed(turns):
        job = pair[turn % FILLER]
        source = job.chain.pieces if turn < FILLER else job.fillers
        order += source[issued[turn]].operators
        issued[turn] += 1
    for which in (0, 1):
        for filler in pair[which].fillers[last.filled[which] :]:
            order += filler.operators
    return tuple(order)
