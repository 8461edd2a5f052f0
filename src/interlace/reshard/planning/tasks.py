"""Unit tasks by tile intersection (paper, section 3), and the payloads that travel together.

Equal tensors (shape, element size and layouts alike) are planned once: the tasks of a Llama's 80
layers are those of one layer, each with 80 tensors in it. Tasks with the same senders and the same
receivers then form one `Bundle`, so small tensors travel in one message with large ones.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from interlace.reshard.planning.layout import Box, Layout, intersection
from interlace.reshard.planning.transfer_plan import Copy, Part, Task, TensorSpec


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tasks with the same senders and receivers, as one payload."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    tasks: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a bundle: what one message holds."""

    parts: tuple[Part, ...]
    size_bytes: int


def make_tasks(specs: Sequence[TensorSpec]) -> tuple[tuple[Task, ...], tuple[Copy, ...]]:
    """All unit tasks, tensor by tensor, and the local copies of ranks that hold what they need."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        key = (spec.shape, spec.itemsize, spec.source, spec.destination)
        groups.setdefault(key, []).append(i)
    tasks: list[Task] = []
    copies: list[Copy] = []
    for tensors in groups.values():
        spec = specs[tensors[0]]
        for box, holders, needers in unit_slices(spec.source, spec.destination):
            held = set(holders)
            copies += [Copy(rank, len(tasks)) for rank in needers if rank in held]
            receivers = tuple(rank for rank in needers if rank not in held)
            tasks.append(
                Task(tensors=tuple(tensors), box=box, senders=holders, receivers=receivers)
            )
    return tuple(tasks), tuple(copies)


def unit_slices(
    source: Layout, destination: Layout
) -> Iterator[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
    """(box, ranks that hold it, ranks that need it) of every pair of tiles that intersect.

    Mesh axes cut dimensions independently, so the tiles of a layout are all combinations of its
    intervals per dimension, and only the overlapping ones are visited.
    """
    tiles = source.tiles()
    cuts = [sorted({box[d] for box in tiles}) for d in range(len(source.shape))]
    for need, needers in destination.tiles().items():
        touched = [
            intervals[
                bisect_right(intervals, start, key=lambda cut: cut[1]) : bisect_left(
                    intervals, stop, key=lambda cut: cut[0]
                )
            ]
            for intervals, (start, stop) in zip(cuts, need, strict=True)
        ]
        for tile in product(*touched):
            common = intersection(tile, need)
            assert common is not None
            yield common, tiles[tile], needers


def make_bundles(specs: Sequence[TensorSpec], tasks: Sequence[Task]) -> list[Bundle]:
    """Tasks that anyone receives, merged where senders and receivers are the same."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for i, task in enumerate(tasks):
        if task.receivers:
            groups.setdefault((task.senders, task.receivers), []).append(i)
    return [
        Bundle(senders, receivers, tuple(members), sum(_bytes(specs, tasks[i]) for i in members))
        for (senders, receivers), members in groups.items()
    ]


def _bytes(specs: Sequence[TensorSpec], task: Task) -> int:
    return task.elements * specs[task.tensors[0]].itemsize


def cut(
    specs: Sequence[TensorSpec], tasks: Sequence[Task], bundle: Bundle, pieces: int
) -> list[Chunk]:
    """The bundle in up to `pieces` chunks of about equal bytes; none is empty.

    Cuts are moved to whole rows of a task's box where rows are short against a chunk: such parts
    are one strided copy.
    """
    chunks: list[Chunk] = []
    parts: list[Part] = []
    total, k, base = bundle.size_bytes, 1, 0
    for i in bundle.tasks:
        itemsize = specs[tasks[i].tensors[0]].itemsize
        elements = tasks[i].elements
        grain = _grain(tasks[i].box, total // pieces // itemsize)
        at, end = 0, base + elements * itemsize
        while k <= pieces and total * k // pieces <= end:
            stop = max((total * k // pieces - base) // itemsize // grain * grain, 0)
            if stop > at:
                parts.append(Part(i, at, stop))
                at = stop
            if parts:
                chunks.append(_chunk(parts, specs, tasks))
                parts = []
            k += 1
        if at < elements:
            parts.append(Part(i, at, elements))
        base = end
    assert not parts
    return chunks


def _chunk(parts: Sequence[Part], specs: Sequence[TensorSpec], tasks: Sequence[Task]) -> Chunk:
    size = sum((p.stop - p.start) * specs[tasks[p.task].tensors[0]].itemsize for p in parts)
    return Chunk(tuple(parts), size)


def _grain(box: Box, chunk_elements: int) -> int:
    """Elements to which cuts are rounded: the most trailing dimensions that a chunk holds 16 of."""
    grain = 1
    for start, stop in reversed(box):
        if grain * (stop - start) * 16 > chunk_elements:
            break
        grain *= stop - start
    return grain
