"""Schedules as text that reads back: one line for each rank, items apart by commas; before them,
where a schedule was made for one cut of a model, with which sub-modules its chunks begin.

split_at: layers.3, layers.6, layers.8
rank 0: forward_0 1, send forward_0>1 1 to rank 1, forward_3 1 | backward_0 1, ...
"""

import re
from collections.abc import Sequence

from interlace.errors import InputError
from interlace.ir.actions import Action, Direction, Slot, strand
from interlace.ir.stage_messages import Item, Receive, Send, StageMessage

_LINE = re.compile(r"rank (\d+): ?(.*)")
"""Finds the number of a rank and its items."""
_MESSAGE = re.compile(r"(send|receive) (forward|backward)_(\d+)>(\d+) (\d+) (?:to|from) rank (\d+)")
"""Finds what a message is, as `Send` and `Receive` are printed."""
_SLOT = re.compile(r"([a-z]+(?:_\d+)?) (\d+)")
"""Finds the strand of a slot and its micro-batch."""


_SPLIT_AT = re.compile(r"split_at: *(.*)")
"""Finds the sub-modules with which chunks begin."""


def write_schedule(ranks: Sequence[Sequence[Item]], split_at: Sequence[str] = ()) -> str:
    """The lists of all ranks, for chunks that begin with these sub-modules, if any are given."""
    cut = f"split_at: {', '.join(split_at)}\n" if split_at else ""
    return cut + "".join(
        f"rank {rank}: {', '.join(str(item) for item in items)}".rstrip() + "\n"
        for rank, items in enumerate(ranks)
    )


def read_schedule(text: str, where: str = "schedule") -> tuple[tuple[Item, ...], ...]:
    """The lists of all ranks. Raises InputError, with `where` and the line, for text that is
    none."""
    found: list[tuple[Item, ...]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or (not found and _SPLIT_AT.fullmatch(line.strip())):
            continue
        place = f"{where}, line {number}"
        matched = _LINE.fullmatch(line.strip())
        if matched is None or int(matched[1]) != len(found):
            raise InputError(
                f"{place}: {line.strip()!r:.60} is not the line of rank {len(found)}",
                hint=f"write 'rank {len(found)}: forward_0 1, ...'",
            )
        parts = [part.strip() for part in matched[2].split(",") if part.strip()]
        found.append(tuple(_item(part, place) for part in parts))
    return tuple(found)


def read_split_at(text: str) -> tuple[str, ...]:
    """The sub-modules with which chunks begin, but the first, if a schedule's text says them."""
    for line in text.splitlines():
        if matched := _SPLIT_AT.fullmatch(line.strip()):
            return tuple(part.strip() for part in matched[1].split(",") if part.strip())
    return ()


def _item(text: str, where: str) -> Item:
    matched = _MESSAGE.fullmatch(text)
    if matched is not None:
        kind, direction, source, to, micro_batch, rank = matched.groups()
        message = StageMessage(Direction(direction), int(source), int(to), int(micro_batch))
        return (Send if kind == "send" else Receive)(message, int(rank))
    slots = [_SLOT.fullmatch(part.strip()) for part in text.split("|")]
    if any(slot is None for slot in slots):
        raise InputError(
            f"{where}: {text!r} is neither an action nor a message",
            hint="write 'forward_0 1', 'forward_0 2 | backward_1 1', "
            "'send forward_0>1 1 to rank 1' or 'receive forward_0>1 1 from rank 0'",
        )
    return Action(tuple(Slot(strand(slot[1]), int(slot[2])) for slot in slots if slot))
