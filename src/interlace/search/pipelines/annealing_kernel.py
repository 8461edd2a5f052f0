"""The loop of `annealing`, compiled by numba: times and memory of lists of passes by the rules of
`step_clock`, and changes of them. A test holds it equal to `step_clock`.

Lists are one array, (rank, place). An action is one whole number: a pass (what, chunk, micro-batch)
takes its lower 32 bits, a second one the upper 32, or 0. All of it is in one file, as numba keeps
compiled functions until their own file changes, whatever becomes of those that they call.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

F, B, I, W = range(4)  # noqa: E741  as in step_clock
CHUNK_AT, NUMBER_AT, SECOND_AT = 2, 15, 32
"""At which bits chunk, micro-batch and second pass begin; what a pass is takes the first two."""
CHUNK, NUMBER, PASS = (1 << 13) - 1, (1 << 16) - 1, (1 << 32) - 1
"""The bits of a chunk and of a micro-batch, moved down, and of the first pass."""
FORWARD, INPUT, WEIGHT, SAVED, KEPT, HELD, BOUNDARY = range(7)
"""Rows of the array of units."""
_SAVED, _KEPT, _HOP = 4, 5, 6
"""Rows of the array of chunks, behind the times of F, B, I and W."""
_BOUNDARIES = 0.05
"""Share of changes that move boundaries of chunks; a choice."""
_FARTHEST = 2
"""Units by which a boundary moves at most; a choice."""
_SHIFTS, _EXCHANGES = 0.75, 0.1
"""Shares of changes that move an action, and that exchange two of a kind; the others cut or join a
backward, or pair or part passes. A choice."""
_REACHES = (2, 2, 6, 24)
"""By how many places an action moves at most, one of these; a choice."""
_NEAR = 12
"""Places between actions that are exchanged, at most; a choice."""
_JOIN_REACH = 8
"""Places behind gradients of inputs in which those of weights are looked for; a choice."""


Array = Any
"""Of numpy; numba knows the kinds of numbers in it."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """The function compiled at its first call, and kept for later processes where the folder of the
    package or of the user's cache can be written; else it is compiled in each."""
    try:
        return cast("_Function", njit(cache=True)(function))
    except RuntimeError:
        return cast("_Function", njit(function))


@compiled
def anneal(
    lists: Array, counts: Array, starts: Array, units: Array, rank_of: Array, everywhere: int,
    limit: int, ns_per_byte: float, micro_batches: int, overlap: float, tries: int,
    hot_ns: float, cold_ns: float, seed: int,
) -> int:  # fmt: skip
    """The length of the best step found within so many changes: time counts, and `ns_per_byte` for
    the most that a rank holds and keeps, up to `limit`. Its lists, how many actions they have and
    where chunks start are left in the first three arrays. -1 for lists that do not run."""
    count = len(rank_of)
    chunks, held = np.zeros((7, count), np.int64), np.zeros(len(counts), np.int64)
    ready = np.empty((2, count, micro_batches + 1), np.int64)
    seen = np.zeros((4, count), np.int64)
    state = np.array([np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15)], np.uint64)
    cost_chunks(units, starts, rank_of, everywhere, chunks, held)
    peaks = np.zeros(len(counts), np.int64)
    _peaks_of(lists, counts, chunks, held, peaks)
    length = length_ns(lists, counts, chunks, rank_of, overlap, 1 << 62, ready)
    if length < 0:
        return -1
    now = best = length + ns_per_byte * peaks.max()
    best_length, best_lists, best_counts, best_starts = (
        length, lists.copy(), counts.copy(), starts.copy()
    )  # fmt: skip
    before, old_starts, old_peaks = np.empty_like(lists[0]), starts.copy(), peaks.copy()
    for done in range(tries):
        heat = hot_ns * (cold_ns / hot_ns) ** (done / tries)
        worst = now - np.log(1 - draw(state)) * heat
        moves = draw(state) < _BOUNDARIES
        rank, sound, length = below(state, len(counts)), False, -1
        own, size = lists[rank], counts[rank]
        old_peaks[:] = peaks
        if moves:
            old_starts[:] = starts
            if _moved(starts, state):
                cost_chunks(units, starts, rank_of, everywhere, chunks, held)
                _peaks_of(lists, counts, chunks, held, peaks)
                sound = True
        else:
            before[: size + 1] = own[: size + 1]
            counts[rank] = change(own, size, overlap > 0, state)
            if counts[rank] >= 0 and numbered(own, counts[rank], seen):
                peaks[rank] = held[rank] + peak_bytes(own, counts[rank], chunks)
                sound = True
        if sound and peaks.max() <= limit:
            most = int(worst - ns_per_byte * peaks.max())
            length = length_ns(lists, counts, chunks, rank_of, overlap, most, ready)
        if length < 0:
            peaks[:] = old_peaks
            if moves:
                starts[:] = old_starts
                cost_chunks(units, starts, rank_of, everywhere, chunks, held)
            else:
                own[: size + 1], counts[rank] = before[: size + 1], size
            continue
        now = length + ns_per_byte * peaks.max()
        if now < best:
            best, best_length = now, length
            best_lists[:], best_counts[:], best_starts[:] = lists, counts, starts
    lists[:], counts[:], starts[:] = best_lists, best_counts, best_starts
    return best_length


@compiled
def draw(state: Array) -> float:
    """From 0 up to 1, by xorshift (Marsaglia 2003)."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return float(x >> np.uint64(11)) / 9007199254740992.0


@compiled
def below(state: Array, count: int) -> int:
    """A whole number from 0 up to `count`."""
    return int(draw(state) * count)


@compiled
def cost_chunks(
    units: Array, starts: Array, rank_of: Array, everywhere: int, chunks: Array, held: Array
) -> None:
    """Fill in what chunks that start there cost, and what their ranks hold. `starts` ends with the
    number of units."""
    held[:] = everywhere
    for chunk in range(len(rank_of)):
        chunks[:, chunk] = 0
        for unit in range(starts[chunk], starts[chunk + 1]):
            chunks[F, chunk] += units[FORWARD, unit]
            chunks[I, chunk] += units[INPUT, unit]
            chunks[W, chunk] += units[WEIGHT, unit]
            chunks[_SAVED, chunk] += units[SAVED, unit]
            chunks[_KEPT, chunk] += units[KEPT, unit]
            held[rank_of[chunk]] += units[HELD, unit]
        chunks[B, chunk] = chunks[I, chunk] + chunks[W, chunk]
        last = chunk + 1 == len(rank_of)
        same = last or rank_of[chunk] == rank_of[chunk + 1]
        chunks[_HOP, chunk] = -1 if same else units[BOUNDARY, starts[chunk + 1] - 1]


@compiled
def peak_bytes(own: Array, count: int, chunks: Array) -> int:
    """The most that saved values of a rank's actions take at a time."""
    now = most = 0
    for at in range(count):
        freed, action = 0, own[at]
        while action:
            what, chunk = action & 3, action >> CHUNK_AT & CHUNK
            saved, kept = chunks[_SAVED, chunk], chunks[_KEPT, chunk]
            if what == F:
                now += saved
            elif what == B:
                freed += saved
            elif what == I:
                now += max(0, kept - saved)
                freed += max(0, saved - kept)
            else:
                freed += kept
            action >>= SECOND_AT
        most = max(most, now)
        now -= freed
    return most


@compiled
def _peaks_of(lists: Array, counts: Array, chunks: Array, held: Array, peaks: Array) -> None:
    for rank in range(len(counts)):
        peaks[rank] = held[rank] + peak_bytes(lists[rank], counts[rank], chunks)


@compiled
def numbered(own: Array, count: int, seen: Array) -> bool:
    """Number the passes of each chunk and kind as they stand, in place; whether gradients of
    weights then stand behind those of their inputs, and both halves of a whole backward are due.
    `seen`, (4, chunks), is written over.

    Micro-batches are alike, so an order in which one overtakes another gains nothing."""
    seen[:] = 0
    for at in range(count):
        action, code, shift = own[at], 0, 0
        while action:
            what, chunk = action & 3, action >> CHUNK_AT & CHUNK
            if what == B:
                seen[I, chunk] += 1
                seen[W, chunk] += 1
                number = seen[I, chunk]
                sound = number == seen[W, chunk]
            else:
                seen[what, chunk] += 1
                number = seen[what, chunk]
                sound = what != W or number <= seen[I, chunk]
            if not sound:
                return False
            code |= (number << NUMBER_AT | chunk << CHUNK_AT | what) << shift
            shift += SECOND_AT
            action >>= SECOND_AT
        own[at] = code
    return True


@compiled
def length_ns(
    lists: Array, counts: Array, chunks: Array, rank_of: Array, overlap: float, most: int,
    ready: Array,
) -> int:  # fmt: skip
    """From the first start to the last end; -1 if ranks would wait for ever, or once a rank runs
    for longer than `most`. `ready`, (2, chunks, micro-batches + 1), is written over.

    One function, as calls that hand arrays on take numba ten times as long as what they do."""
    ready[:] = -1
    ready[0, 0, :] = 0
    ranks, last = len(counts), len(rank_of) - 1
    free, at = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    links = np.zeros((ranks, ranks), np.int64)
    moving = True
    while moving:
        moving = False
        for rank in range(ranks):
            now, place, count = free[rank], at[rank], counts[rank]
            while place < count:
                action, start = lists[rank, place], now
                part = action
                while part and start >= 0:
                    what = part & 3
                    if what != W:
                        way = 0 if what == F else 1
                        when = ready[way, part >> CHUNK_AT & CHUNK, (part & PASS) >> NUMBER_AT]
                        start = -1 if when < 0 else max(start, when)
                    part >>= SECOND_AT
                if start < 0:
                    break
                took, other = chunks[action & 3, action >> CHUNK_AT & CHUNK], action >> SECOND_AT
                if other:
                    second = chunks[other & 3, other >> CHUNK_AT & CHUNK]
                    took = max(took, second, int(np.rint((took + second) * (1 - overlap))))
                now, place = start + took, place + 1
                while action:
                    what, chunk = action & 3, action >> CHUNK_AT & CHUNK
                    number = (action & PASS) >> NUMBER_AT
                    action >>= SECOND_AT
                    turns = what == F and chunk == last
                    way = 0 if what == F and not turns else 1
                    to = chunk if turns else chunk + 1 if what == F else chunk - 1
                    if what == W or to < 0:
                        continue
                    hop, end = -1 if turns else chunks[_HOP, min(chunk, to)], now
                    if hop >= 0:
                        end = max(now, links[rank, rank_of[to]]) + hop
                        links[rank, rank_of[to]] = end
                    ready[way, to, number] = end
            if place > at[rank]:
                moving, at[rank], free[rank] = True, place, now
                if now > most:
                    return -1
    for rank in range(ranks):
        if at[rank] < counts[rank]:
            return -1
    return free.max()


@compiled
def _moved(starts: Array, state: Array) -> bool:
    """One boundary or two moved; whether every chunk still has a unit."""
    inner = len(starts) - 2
    if inner < 1:
        return False
    for _ in range(1 + below(state, 2)):
        by = 1 + below(state, _FARTHEST)
        starts[1 + below(state, inner)] += by if draw(state) < 0.5 else -by
    return (starts[1:] > starts[:-1]).all()


@compiled
def change(own: Array, count: int, overlapped: bool, state: Array) -> int:
    """Change a rank's list in place; how many actions it has then, or -1 where a draw changes
    nothing."""
    at, way = below(state, count), draw(state)
    if way < _SHIFTS:
        reach = _REACHES[below(state, len(_REACHES))]
        by = 1 + below(state, reach)
        return _shift(own, count, at, at + by if draw(state) < 0.5 else at - by)
    if way < _SHIFTS + _EXCHANGES:
        return _exchange(own, count, at, at + 1 + below(state, _NEAR))
    if overlapped and draw(state) < 0.5:
        return _pair_or_part(own, count, at)
    return _cut_or_join(own, count, at)


@compiled
def _shift(own: Array, count: int, at: int, to: int) -> int:
    step = 1 if to > at else -1
    if to < 0 or to >= count or (at + step == to and _kind(own[at]) == _kind(own[to])):
        return -1
    moved = own[at]
    for place in range(at, to, step):
        own[place] = own[place + step]
    own[to] = moved
    return count


@compiled
def _exchange(own: Array, count: int, at: int, to: int) -> int:
    """Two that are alike, of other chunks."""
    if to >= count or own[at] >> SECOND_AT or own[to] >> SECOND_AT:
        return -1
    if own[at] & 3 != own[to] & 3 or _kind(own[at]) == _kind(own[to]):
        return -1
    own[at], own[to] = own[to], own[at]
    return count


@compiled
def _kind(action: int) -> int:
    """An action without the numbers of micro-batches."""
    low = (1 << NUMBER_AT) - 1
    return action & (low | low << SECOND_AT)


@compiled
def _cut_or_join(own: Array, count: int, at: int) -> int:
    action = own[at]
    if action >> SECOND_AT:
        return -1
    if (action & 3) == B:
        _open(own, count, at)
        own[at], own[at + 1] = action - B + I, action - B + W
        return count + 1
    if (action & 3) != I:
        return -1
    for place in range(at + 1, min(count, at + 1 + _JOIN_REACH)):
        if own[place] == action - I + W:
            own[at] = action - I + B
            _close(own, count, place)
            return count - 1
    return -1


@compiled
def _pair_or_part(own: Array, count: int, at: int) -> int:
    first, other = own[at] & PASS, own[at] >> SECOND_AT
    if other:
        _open(own, count, at)
        own[at], own[at + 1] = first, other
        return count + 1
    if at + 1 >= count or own[at + 1] >> SECOND_AT:
        return -1
    second = own[at + 1]
    if first & 3 != F:
        first, second = second, first
    if first & 3 != F or (second & 3 != B and second & 3 != I):
        return -1
    own[at] = first | second << SECOND_AT
    _close(own, count, at + 1)
    return count - 1


@compiled
def _open(own: Array, count: int, at: int) -> None:
    """Room behind an action for a copy of it."""
    for place in range(count, at, -1):
        own[place] = own[place - 1]


@compiled
def _close(own: Array, count: int, at: int) -> None:
    for place in range(at, count - 1):
        own[place] = own[place + 1]
