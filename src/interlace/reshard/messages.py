"""Which bytes of which local tensors a message holds, and how they get in and out.

A message is the concatenation of its spans, each aligned to 16 bytes, so that tensors of any dtype
share one. A message of one span whose elements lie next to each other in memory needs no buffer:
it is sent from, or received into, the tensor itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from interlace.reshard.planning.layout import Box
from interlace.reshard.planning.transfer_plan import Part, TransferPlan, sub_boxes

ALIGNMENT_BYTES = 16
"""Bytes to which spans are aligned, the largest element size of torch's types: a view of a buffer
as another dtype must begin at a multiple of its element size."""

Region = tuple[slice, ...]
"""A box of a local tensor, as its index."""


@dataclass(frozen=True, slots=True)
class ElementSpan:
    """Elements of one local tensor, in the row-major order of their unit slice."""

    tensor: int
    """Index into the plan's specs."""
    of_source: bool
    """Of the source tensor, or of the destination (received, or to be forwarded)."""
    regions: tuple[Region, ...]
    flat: tuple[int, int] | None
    """The same elements as [start, stop) of a contiguous local tensor, if they are one run of
    it."""
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """What one send or receive carries; `size_bytes` is the size on the wire."""

    spans: tuple[ElementSpan, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Shards:
    """A rank's local tensors, by index into the plan's specs; None where it holds nothing."""

    sources: Sequence[Tensor | None]
    destinations: Sequence[Tensor | None]

    def of(self, span: ElementSpan) -> Tensor:
        """The tensor that the span's elements are in."""
        tensor = (self.sources if span.of_source else self.destinations)[span.tensor]
        assert tensor is not None, "the plan uses a tensor that this rank does not hold"
        return tensor


@dataclass(frozen=True, slots=True)
class Boxes:
    """What a rank holds and wants of every tensor; None where that is nothing."""

    sources: Sequence[Box | None]
    destinations: Sequence[Box | None]

    def make_message(self, plan: TransferPlan, parts: Iterable[tuple[Part, bool]]) -> Message:
        """The message of parts, each with whether it is read from the source tensor."""
        spans: list[ElementSpan] = []
        end = 0
        for part, of_source in parts:
            task = plan.tasks[part.task]
            for tensor, start, stop in part.in_tensors(task):
                local = (self.sources if of_source else self.destinations)[tensor]
                assert local is not None, "the plan uses a tensor that this rank does not hold"
                offset = _aligned(end)
                end = offset + (stop - start) * plan.specs[tensor].itemsize
                regions = (local_region(box, local) for box in sub_boxes(task.box, start, stop))
                first = _first_of_run(task.box, local)
                flat = None if first is None else (first + start, first + stop)
                spans.append(
                    ElementSpan(tensor, of_source, tuple(regions), flat, offset, end - offset)
                )
        return Message(tuple(spans), end)


def split_parts(
    plan: TransferPlan, parts: Iterable[Part], most_bytes: int
) -> list[tuple[Part, ...]]:
    """Parts in their order, cut into groups that make messages of at most `most_bytes`.

    `most_bytes` is a positive multiple of the alignment.
    """
    groups: list[list[Part]] = []
    room = 0
    for part in parts:
        task = plan.tasks[part.task]
        each, itemsize = task.box_elements, plan.specs[task.tensors[0]].itemsize
        start = part.start
        while start < part.stop:
            if room < ALIGNMENT_BYTES:
                groups.append([])
                room = most_bytes
            of_this_tensor = each - start % each
            stop = min(part.stop, start + min(of_this_tensor, room // itemsize))
            last = groups[-1][-1] if groups[-1] else None
            if last is not None and last.task == part.task and last.stop == start:
                groups[-1][-1] = Part(part.task, last.start, stop)
            else:
                groups[-1].append(Part(part.task, start, stop))
            room -= _aligned((stop - start) * itemsize)
            start = stop
    return [tuple(group) for group in groups]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def in_place(message: Message, shards: Shards) -> Tensor | None:
    """The message's bytes inside the tensor, if they are one run of its memory."""
    if len(message.spans) != 1:
        return None
    span = message.spans[0]
    tensor = shards.of(span)
    if span.flat is not None and tensor.is_contiguous():
        return tensor.view(-1)[slice(*span.flat)].view(torch.uint8)
    if len(span.regions) == 1 and (part := tensor[span.regions[0]]).is_contiguous():
        return part.view(-1).view(torch.uint8)
    return None


def pack(message: Message, shards: Shards, buffer: Tensor) -> None:
    """Copies the message's elements from the tensors into a buffer of bytes."""
    for part, place in _places(message, shards, buffer):
        place.copy_(part)


def unpack(message: Message, shards: Shards, buffer: Tensor) -> None:
    """Copies the message's elements from a buffer of bytes into the tensors."""
    for part, place in _places(message, shards, buffer):
        part.copy_(place)


def local_region(box: Box, local: Box) -> Region:
    """A box of the whole tensor as a region of the part of it that is `local`."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, local, strict=True)
    )


def _first_of_run(box: Box, local: Box) -> int | None:
    """Where `box` begins in a row-major `local`; None unless it is one run of it.

    It is one if no dimension but those of a single index comes before a dimension that is cut.
    """
    first, stride, cut = 0, 1, False
    for (start, stop), (begin, end) in zip(reversed(box), reversed(local), strict=True):
        if cut and stop - start > 1:
            return None
        cut = cut or stop - start < end - begin
        first += (start - begin) * stride
        stride *= end - begin
    return first


def _places(message: Message, shards: Shards, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(elements in a local tensor, their place in the buffer) for all of the message."""
    for span in message.spans:
        tensor = shards.of(span)
        flat = buffer[span.offset_bytes : span.offset_bytes + span.size_bytes].view(tensor.dtype)
        at = 0
        for region in span.regions:
            part = tensor[region]
            size = prod(part.shape)
            yield part, flat[at : at + size].view(part.shape)
            at += size
