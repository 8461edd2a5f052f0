"""Bytes that a job keeps alive, by how many of its pieces and of its fillers have been issued.

What is alive depends on the set of operators issued, and no value passes from one job of a pair to
the other, so the bytes of a pair are the sum over its jobs. A value that operator p of the main
chain makes, the chain last reads at r, and filler q reads last, is alive while p <= a <= r, and
after that while filler q has not run: two rectangles in the plane of both counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interlace.search.chains import Chain
from interlace.search.memory import Liveness


@dataclass(frozen=True, slots=True)
class Room:
    """A limit for the bytes that both jobs of a pair keep alive together."""

    tables: tuple["JobMemory", ...]
    """Of each chain."""
    free: int
    """Bytes left by what lives all the time; negative if that alone is above the limit."""

    @classmethod
    def within(cls, limit: int, chains: Sequence[Chain], values: Liveness) -> "Room":
        """Room of `limit` bytes for `chains`."""
        tables = tuple(JobMemory(chain, values) for chain in chains)
        constant = values.start - sum(table.alive[0][0] for table in tables)
        return cls(tables, limit - constant)


class JobMemory:
    """Tables of one chain, `[pieces issued][fillers issued]`, in bytes."""

    def __init__(self, chain: Chain, values: Liveness) -> None:
        numbers = [[values.number[name] for name in piece.operators] for piece in chain.pieces]
        main = [number for piece in numbers for number in piece]
        fillers = [[values.number[name] for name in filler.operators] for filler in chain.fillers]
        step = {number: a for a, number in enumerate(main)}
        turn = {number: f for f, group in enumerate(fillers) for number in group}
        during, after, filling = _count(values, step, turn, len(main), len(fillers))
        ends = np.cumsum([len(piece) for piece in numbers], dtype=np.int64)
        starts = ends - [len(piece) for piece in numbers]
        self.alive: list[list[int]] = after[[0, *ends]].tolist()
        """Between operators."""
        peaks = np.maximum.reduceat(during, starts) if main else during
        self.piece: list[list[int]] = peaks.tolist()
        """While the next piece runs."""
        self.filler: list[int] = filling.tolist()
        """What a filler's own results add while it runs."""


def _count(
    values: Liveness, step: dict[int, int], turn: dict[int, int], steps: int, turns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(while main operator a runs, after a operators, by filler): shapes (steps, turns + 1),
    (steps + 1, turns + 1), (turns,)."""
    chain = np.zeros((2, steps + 2), dtype=np.int64)  # differences over a: while running, after
    held = np.zeros((2, steps + 2, turns + 2), dtype=np.int64)
    loose = np.zeros(turns + 2, dtype=np.int64)
    filling = np.zeros(turns, dtype=np.int64)
    for value, size in enumerate(values.size):
        readers = _holders(values, value, step)
        mine = value in step or value in turn or any(r in step or r in turn for r in readers)
        if not size or not mine:
            continue
        last = max((step[r] for r in readers if r in step), default=step.get(value, -1))
        filler = max((turn[r] for r in readers if r in turn), default=-1)
        if value in turn:
            filling[turn[value]] += size
            loose[turn[value] + 1] += size
            loose[turns + 1 if values.kept[value] else max(filler, turn[value]) + 1] -= size
            continue
        made = step.get(value, -1)
        if values.kept[value]:
            last, filler = steps, -1
        for column, first in enumerate((max(made, 0), made + 1)):
            chain[column, first] += size
            chain[column, last + 1] -= size
            if filler >= 0:
                held[column, last + 1, filler] += size
    lasting = np.cumsum(chain, axis=1)[:, : steps + 1, None]
    waiting = np.cumsum(np.cumsum(held, axis=1)[:, :, ::-1], axis=2)[:, :, ::-1]
    total = lasting + waiting[:, : steps + 1, : turns + 1] + np.cumsum(loose)[: turns + 1]
    return total[0, :steps], total[1], filling


def _holders(values: Liveness, value: int, step: dict[int, int]) -> list[int]:
    """Operators that keep a value alive until they have run: its readers and, for collectives among
    them, who waits first on the main chain, or a filler if only fillers wait."""
    found = list(values.users[value])
    for reader in values.users[value]:
        if values.collectives[reader] and values.users[reader]:
            found.append(min(values.users[reader], key=lambda user: (user not in step, user)))
    return found
