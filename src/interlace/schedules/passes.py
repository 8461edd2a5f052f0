"""Passes over the actions of a schedule: each takes actions and gives actions.

A schedule says which passes of the model run side by side. What a step does beside that follows
from the graphs that a rank has, so it is added here, for every schedule alike.
"""

from collections.abc import Container, Sequence
from dataclasses import replace

from interlace.ir.actions import Action, Direction, Share, Slot, Strand


def with_ends(actions: Sequence[Action], graphs: Container[str]) -> tuple[Action, ...]:
    """The first forward and the last backward run by graphs of their own, where `graphs` has them
    (`first`, `final`) and no other strand is beside: that hides collectives inside one strand."""
    found = list(actions)
    for place, direction in ((0, Direction.FORWARD), (-1, Direction.BACKWARD)):
        strand = found[place].slots[0].strand
        end = replace(strand, share=Share.END)
        alone = len(found[place].slots) == 1 and strand.direction == direction
        if alone and end.graph in graphs:
            found[place] = Action((replace(found[place].slots[0], strand=end),))
    return tuple(found)


def with_heads(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Where a forward runs beside a backward, its head runs one action before. Then no action
    starts with both strands waiting for their first collective (docs/decisions/0007)."""
    found = list(actions)
    for index in range(1, len(actions)):
        slots = list(found[index].slots)
        place = _forward_beside_backward(slots)
        if place is None:
            continue
        slot = slots[place]
        slots[place] = replace(slot, strand=replace(slot.strand, share=Share.REST))
        head = replace(slot, strand=replace(slot.strand, share=Share.HEAD))
        found[index] = Action(tuple(slots))
        found[index - 1] = _with_head(found[index - 1], head)
    return tuple(found)


def with_once_a_step(actions: Sequence[Action], graphs: Container[str]) -> tuple[Action, ...]:
    """What data-parallel ranks exchange once a step: weights are gathered (`gather`) in the first
    action, sums of gradients reduced (`reduce`) in the last one."""
    found = list(actions)
    gather, reduce = (Strand(each, None, Share.ONCE) for each in Direction)
    if gather.graph in graphs:
        first = found[0]
        found[0] = Action((Slot(gather, first.slots[0].micro_batch), *first.slots))
    if reduce.graph in graphs:
        last = found[-1]
        found[-1] = Action((*last.slots, Slot(reduce, last.slots[-1].micro_batch)))
    return tuple(found)


def _forward_beside_backward(slots: Sequence[Slot]) -> int | None:
    """The place of a whole forward pass in an action that runs a backward too."""
    directions = {slot.strand.direction for slot in slots}
    for place, slot in enumerate(slots):
        is_whole = slot.strand == Strand(Direction.FORWARD, slot.strand.chunk)
        if is_whole and len(directions) == 2:
            return place
    return None


def _with_head(action: Action, head: Slot) -> Action:
    """The head behind the forwards of an action, before its backwards."""
    place = sum(slot.strand.direction == Direction.FORWARD for slot in action.slots)
    return Action((*action.slots[:place], head, *action.slots[place:]))
