"""The sends of a decomposed collective, written into a graph in the order of CommFuse.

The rows of a rank are cut into ranges, each of which travels by itself. A ring hands slices on to a
neighbour, of which `bidirectional` sends half the rows each way; `direct` sends each slice straight
to where it is needed, another rank in each step. Operators, shapes and names are the same on every
rank; only which rows are read and to whom they go depends on the rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from interlace.decompose.order import gathered_owner, hop, scattered_owner
from interlace.graphs.writer import GraphWriter

aten = torch.ops.aten
_functional = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [first, first + rows) of every rank's part. `direction` 1 goes to the next rank, -1 to
    the one before."""

    first: int
    rows: int
    direction: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """How slices travel among the ranks of a group."""

    group: str
    ranks: int
    rank: int
    rows: int
    """Of one rank."""
    row_ranges: tuple[RowRange, ...]
    direct: bool = False


def cut_rows(rows: int, pieces: int, variant: str) -> tuple[RowRange, ...]:
    """`pieces` ranges of a rank's rows, or fewer where there are not so many rows;
    `bidirectional` makes two of each."""
    row_ranges = []
    for first, count in _even(0, rows, pieces):
        if variant == "bidirectional":
            halves = _even(first, count, 2)
            row_ranges += [RowRange(*half, direction=1 - 2 * i) for i, half in enumerate(halves)]
        else:
            row_ranges.append(RowRange(first, count))
    return tuple(row_ranges)


def _even(first: int, rows: int, parts: int) -> list[tuple[int, int]]:
    parts = max(1, min(parts, rows))
    ends = [first + rows * part // parts for part in range(parts + 1)]
    return [(a, b - a) for a, b in pairwise(ends)]


def rows_slice(writer: GraphWriter, x: fx.Node, first: int, rows: int) -> fx.Node:
    """Rows [first, first + rows) of x, a view."""
    return writer.call(aten.slice.Tensor, x, 0, first, first + rows)


def send(writer: GraphWriter, x: fx.Node, route: Route, distance: int) -> fx.Node:
    """Start sending x to the rank `distance` above, and receiving as much from as far below."""
    rows = x.meta["val"].shape[0]
    to, source = [0] * route.ranks, [0] * route.ranks
    above, below = hop(route.rank, route.ranks, distance)
    to[above] = source[below] = rows
    return writer.call(_functional.all_to_all_single.default, x, source, to, route.group)


def arrive(writer: GraphWriter, sent: fx.Node) -> fx.Node:
    """What a send of another rank brought."""
    return writer.call(_functional.wait_tensor.default, sent)


def gather_slices(writer: GraphWriter, x: fx.Node, route: Route) -> Iterator[tuple[fx.Node, int]]:
    """Send x [rows, K] around, and yield (slice, its first row among all ranks' rows), own slices
    first; what the caller writes before it asks for the next one runs under the sends."""
    own = [rows_slice(writer, x, t.first, t.rows) for t in route.row_ranges]
    steps = _gather_direct if route.direct else _gather_ring
    yield from steps(writer, own, route)


def _gather_ring(
    writer: GraphWriter, current: list[fx.Node], route: Route
) -> Iterator[tuple[fx.Node, int]]:
    ranks, row_ranges = route.ranks, route.row_ranges
    sent = [send(writer, x, route, t.direction) for x, t in zip(current, row_ranges, strict=True)]
    for step in range(ranks):
        for i, row_range in enumerate(row_ranges):
            if step:
                current[i] = arrive(writer, sent[i])
                if step < ranks - 1:
                    sent[i] = send(writer, current[i], route, row_range.direction)
            owner = gathered_owner(route.rank, ranks, step, row_range.direction)
            yield current[i], owner * route.rows + row_range.first


def _gather_direct(
    writer: GraphWriter, own: list[fx.Node], route: Route
) -> Iterator[tuple[fx.Node, int]]:
    current = own
    for step in range(route.ranks):
        more = step < route.ranks - 1
        sent = [send(writer, x, route, step + 1) for x in own] if more else []
        owner = gathered_owner(route.rank, route.ranks, step)
        for x, row_range in zip(current, route.row_ranges, strict=True):
            arrived = x if not step else arrive(writer, x)
            yield arrived, owner * route.rows + row_range.first
        current = sent


ComputeRows = Callable[[int, int, fx.Node | None], fx.Node]
"""(first row, rows, where to) -> this rank's share of the sum of those rows, in memory of its own
or in that which is given."""


def scatter_slices(
    writer: GraphWriter, compute: ComputeRows, route: Route, result: fx.Node | None
) -> list[fx.Node]:
    """Compute the slices of all ranks, own ones last, and send them to their owners under compute:
    this rank's rows of the sum, one value per range, written into `result` if that is given."""
    parts = [
        rows_slice(writer, result, t.first, t.rows) if result is not None else None
        for t in route.row_ranges
    ]
    steps = _scatter_direct if route.direct else _scatter_ring
    return steps(writer, compute, route, parts)


def _scatter_ring(
    writer: GraphWriter, compute: ComputeRows, route: Route, parts: list[fx.Node | None]
) -> list[fx.Node]:
    sent: list[fx.Node] = []
    results: list[fx.Node] = []
    for step in range(route.ranks):
        last = step == route.ranks - 1
        for i, row_range in enumerate(route.row_ranges):
            owner = scattered_owner(route.rank, route.ranks, step, row_range.direction)
            first = owner * route.rows + row_range.first
            total = compute(first, row_range.rows, parts[i] if last else None)
            if step:
                total = writer.call(aten.add_.Tensor, total, arrive(writer, sent[i]))
            if last:
                results.append(total)
            elif step:
                sent[i] = send(writer, total, route, row_range.direction)
            else:
                sent.append(send(writer, total, route, row_range.direction))
    return results


def _scatter_direct(
    writer: GraphWriter, compute: ComputeRows, route: Route, parts: list[fx.Node | None]
) -> list[fx.Node]:
    """What arrives is added up as it comes, and to the own slice at the end."""
    sums: list[fx.Node | None] = [None] * len(parts)
    sent: list[fx.Node | None] = [None] * len(parts)
    results: list[fx.Node] = []
    for step in range(route.ranks):
        last = step == route.ranks - 1
        owner = scattered_owner(route.rank, route.ranks, step, straight=True)
        for i, row_range in enumerate(route.row_ranges):
            first = owner * route.rows + row_range.first
            total = compute(first, row_range.rows, parts[i] if last else None)
            earlier, before = sent[i], sums[i]
            if not last:
                sent[i] = send(writer, total, route, step + 1)
            if earlier is not None:
                arrived = arrive(writer, earlier)
                if before is None:
                    sums[i] = arrived
                else:
                    sums[i] = writer.call(aten.add_.Tensor, before, arrived)
            received = sums[i]
            if last:
                assert received is not None
                results.append(writer.call(aten.add_.Tensor, total, received))
    return results
