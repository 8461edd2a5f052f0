"""Proves of the actions of one rank that they can run, and that sums keep their order.

Run in turn, every pass must find what it needs: a forward the chunk before, a backward its own
forward and the chunk behind. Passes in one action share an issue order that is searched later, so
none may need another. Gradients of a chunk are added micro-batch by micro-batch, in the order of
their numbers: another order would give other bits than one strand.
"""

from collections.abc import Sequence

from interlace.errors import InputError
from interlace.ir.actions import Action, Direction, Share, Slot

_Pass = tuple[Direction, int, int]
"""(direction, chunk, micro-batch)."""


def check_actions(actions: Sequence[Action], *, micro_batches: int, chunks: int, name: str) -> None:
    """Raise InputError, naming the schedule and the action, unless each pass of each micro-batch
    through each chunk runs once, behind what it needs."""
    done: set[_Pass] = set()
    for number, action in enumerate(actions, 1):
        where = f"schedule {name!r}, action {number} ({action})"
        if not action.slots:
            raise InputError(f"{where} runs nothing", hint="leave it out")
        passes = [_pass(slot, micro_batches, chunks, where) for slot in action.slots]
        for each in passes:
            _check(each, done, passes, chunks, where)
        walks = [(direction, chunk) for direction, chunk, _ in passes]
        if len(set(walks)) < len(walks):
            raise InputError(
                f"{where} runs one graph for two micro-batches",
                hint="put them into two actions: a strand's operators have one name each",
            )
        done.update(passes)
    every = {
        (direction, chunk, index)
        for direction in Direction
        for chunk in range(chunks)
        for index in range(1, micro_batches + 1)
    }
    if missing := sorted(every - done):
        raise InputError(
            f"schedule {name!r} never runs {_words(missing[0])}",
            hint=f"of {micro_batches} micro-batches each passes every chunk forward and backward",
        )


def _pass(slot: Slot, micro_batches: int, chunks: int, where: str) -> _Pass:
    strand, chunk = slot.strand, slot.strand.chunk or 0
    if strand.share != Share.WHOLE:
        raise InputError(
            f"{where} runs {strand.text!r}, a share of a pass",
            hint="a schedule names whole passes; heads, ends and what is exchanged once a step are "
            "added to it",
        )
    if not 1 <= slot.micro_batch <= micro_batches:
        raise InputError(
            f"{where}: there is no micro-batch {slot.micro_batch} of {micro_batches}",
            hint="micro-batches count from 1",
        )
    if (strand.chunk is None) != (chunks == 1) or chunk >= chunks:
        raise InputError(
            f"{where}: {strand.text!r} is not one of {chunks} chunks",
            hint="chunks count from 0; with one chunk leave the number out",
        )
    return strand.direction, chunk, slot.micro_batch


def _check(each: _Pass, done: set[_Pass], beside: list[_Pass], chunks: int, where: str) -> None:
    if each in done:
        raise InputError(f"{where} runs {_words(each)} a second time", hint="run each pass once")
    for needed in _needs(each, chunks):
        if needed in beside:
            raise InputError(
                f"{where} runs {_words(each)} beside {_words(needed)}, which it needs",
                hint="put them into two actions",
            )
        if needed not in done:
            raise InputError(
                f"{where} runs {_words(each)} before {_words(needed)}", hint="turn them round"
            )


def _needs(each: _Pass, chunks: int) -> list[_Pass]:
    """What must have run before: its inputs and, for sums of gradients, the micro-batch before."""
    direction, chunk, micro_batch = each
    if direction == Direction.FORWARD:
        return [(direction, chunk - 1, micro_batch)] if chunk else []
    needs = [(Direction.FORWARD, chunk, micro_batch)]
    if chunk + 1 < chunks:
        needs.append((direction, chunk + 1, micro_batch))
    if micro_batch > 1:
        needs.append((direction, chunk, micro_batch - 1))
    return needs


def _words(each: _Pass) -> str:
    direction, chunk, micro_batch = each
    return f"the {direction} of micro-batch {micro_batch} through chunk {chunk}"
