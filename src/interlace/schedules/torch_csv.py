"""Schedules in the CSV form of `torch.distributed.pipelining`, both ways: a line for each rank, a
cell for each action.

    0F0,0F1,2F0,(0F2;3B0)OVERLAP_F_B,1SEND_F0          chunk, pass, micro-batch from 0

F, B, I and W are forward, backward, and the gradients of inputs and of weights. torch calls a chunk
a stage. Its messages go between neighbouring chunks only.
"""

import csv
import io
import re
from collections.abc import Sequence

from interlace.errors import InputError
from interlace.ir.actions import Action, Direction, Slot, Strand
from interlace.ir.stage_messages import Item, Receive, Send, StageMessage, chunks_of
from interlace.schedules.verify import LETTERS

MEANING = {letter: meaning for meaning, letter in LETTERS.items()}
"""Direction and share of each letter."""
_PASS = re.compile(r"(\d+)([FBIW])(\d+)")
"""Finds chunk, letter and micro-batch."""
_MESSAGE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")
"""Finds chunk, side, direction and micro-batch."""
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")
"""Finds the passes of an action with several."""
_LEFT_OUT = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""Actions of torch that gather and reduce weights; ours follow from the graphs of a rank."""


def to_csv(ranks: Sequence[Sequence[Item]]) -> str:
    """The CSV text. Raises InputError for messages between chunks that are no neighbours."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerows([_cell(item) for item in items] for items in ranks)
    return out.getvalue()


def from_csv(text: str, where: str = "schedule") -> tuple[tuple[Item, ...], ...]:
    """The lists of all ranks. Raises InputError, with `where` and the line, for cells that are no
    actions; empty ones, in which torch's ranks wait, are left out."""
    lines = [
        [(_read(cell.strip(), f"{where}, line {number}"), number) for cell in cells]
        for number, cells in enumerate(csv.reader(io.StringIO(text)), 1)
        if cells
    ]
    found = [[item for item, _ in line if item is not None] for line in lines]
    actions = [[item for item in items if isinstance(item, Action)] for items in found]
    rank_of = chunks_of(actions)
    return tuple(
        tuple(
            _with_rank(item, rank_of, where) if isinstance(item, Send | Receive) else item
            for item in items
        )
        for items in found
    )


def _cell(item: Item) -> str:
    if isinstance(item, Action):
        parts = [_pass(slot) for slot in item.slots]
        return parts[0] if len(parts) == 1 else f"({';'.join(parts)})OVERLAP_F_B"
    message = item.message
    if abs(message.source - message.to) != 1:
        raise InputError(
            f"{item} cannot be written for torch, whose messages go between neighbouring chunks",
            hint="write it as text: schedules.schedule_text.write_schedule",
        )
    letter = "F" if message.direction == Direction.FORWARD else "B"
    own, side = (message.source, "SEND") if isinstance(item, Send) else (message.to, "RECV")
    return f"{own}{side}_{letter}{message.micro_batch - 1}"


def _pass(slot: Slot) -> str:
    strand = slot.strand
    if (strand.direction, strand.share) not in LETTERS:
        raise InputError(
            f"{strand.text!r} cannot be written for torch",
            hint="write the schedule without what passes added to it (heads, ends, exchanges)",
        )
    letter = LETTERS[strand.direction, strand.share]
    return f"{strand.chunk or 0}{letter}{slot.micro_batch - 1}"


def _read(cell: str, where: str) -> Item | None:
    if not cell or cell.lstrip("0123456789").startswith(_LEFT_OUT):
        return None
    if together := _TOGETHER.fullmatch(cell):
        return Action(tuple(_slot(part.strip(), where) for part in together[1].split(";")))
    if message := _MESSAGE.fullmatch(cell):
        chunk, side, letter, micro_batch = message.groups()
        forward, sends = letter == "F", side == "SEND"
        other = int(chunk) + (1 if forward == sends else -1)
        source, to = (int(chunk), other) if sends else (other, int(chunk))
        direction = Direction.FORWARD if forward else Direction.BACKWARD
        found = StageMessage(direction, source, to, int(micro_batch) + 1)
        return (Send if sends else Receive)(found, -1)
    return Action((_slot(cell, where),))


def _slot(text: str, where: str) -> Slot:
    found = _PASS.fullmatch(text)
    if found is None:
        raise InputError(
            f"{where}: {text!r} is no action",
            hint="cells are such as 0F0, 1B2, 0I1, 0W1, (0F3;3B1)OVERLAP_F_B, 0SEND_F1, 1RECV_F1",
        )
    direction, share = MEANING[found[2]]
    return Slot(Strand(direction, int(found[1]), share), int(found[3]) + 1)


def _with_rank(item: Send | Receive, rank_of: dict[int, int], where: str) -> Item:
    other = item.message.to if isinstance(item, Send) else item.message.source
    if other not in rank_of:
        raise InputError(
            f"{where}: {item.message} goes to or comes from chunk {other}, which no rank runs",
            hint="give each chunk its forwards and backwards",
        )
    return type(item)(item.message, rank_of[other])
