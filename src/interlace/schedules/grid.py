"""Draws a schedule as text: a line for each rank, a column for each unit of time.

rank 0  F0 F0 F0    .  B0 ...        F, B, I, W on a chunk; `.` where the rank waits
"""

from collections.abc import Collection, Sequence

from interlace.ir.actions import Action, Slot
from interlace.ir.stage_messages import Edge, StageMessage, Wiring, chain, chunks_of
from interlace.schedules.verify import order_of_run, pass_of


def as_grid(
    ranks: Sequence[Sequence[Action]],
    edges: Collection[Edge] | None = None,
    *,
    marked: Collection[tuple[int, int]] = (),
) -> str:
    """The grid of a schedule if every action takes one unit of time and messages take none. What is
    `marked`, (rank, index of its action), stands in `[]`, and a schedule that cannot run is drawn
    without waiting, as its lists are: `as_grid(ranks, marked=error.places)`."""
    columns = _as_listed(ranks) if marked else _in_time(ranks, edges)
    cells = {at: _cell(ranks[at[0]][at[1]], at in marked) for at in columns}
    width = max((len(cell) for cell in cells.values()), default=1)
    lines = []
    for rank in range(len(ranks)):
        at = {columns[key]: cells[key] for key in cells if key[0] == rank}
        shown = " ".join(
            f"{at.get(column, '.'):<{width}}" for column in range(max(at, default=-1) + 1)
        )
        lines.append(f"rank {rank:<{len(str(len(ranks) - 1))}}  {shown}".rstrip())
    return "\n".join(lines) + "\n"


def _as_listed(ranks: Sequence[Sequence[Action]]) -> dict[tuple[int, int], int]:
    return {(r, i): i for r, actions in enumerate(ranks) for i in range(len(actions))}


def _in_time(
    ranks: Sequence[Sequence[Action]], edges: Collection[Edge] | None
) -> dict[tuple[int, int], int]:
    """The column of each action, by rank and index."""
    edges = chain(1 + max(chunks_of(ranks))) if edges is None else edges
    wiring = Wiring(ranks, edges)
    free = [0] * len(ranks)
    made: dict[StageMessage, int] = {}
    columns: dict[tuple[int, int], int] = {}
    for rank, index in order_of_run(ranks, edges):
        action = ranks[rank][index]
        needed = wiring.needed(action)
        columns[rank, index] = max([free[rank], *(made[message] for message in needed)])
        free[rank] = columns[rank, index] + 1
        made.update(dict.fromkeys(wiring.sent(action), free[rank]))
    return columns


def _cell(action: Action, is_marked: bool) -> str:
    text = "|".join(_slot(slot) for slot in action.slots)
    return f"[{text}]" if is_marked else text


def _slot(slot: Slot) -> str:
    """`F0.2`: forward of chunk 0 on micro-batch 2; without the chunk if there is one."""
    letter, chunk, micro_batch = pass_of(slot)
    return f"{letter}{'' if slot.strand.chunk is None else f'{chunk}.'}{micro_batch}"
