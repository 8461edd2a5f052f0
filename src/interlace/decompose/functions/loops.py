"""The two loops that all decomposed collectives share.

`gather_slices` computes on every rank's slice as it arrives, own slice first; `scatter_slices`
computes every rank's slice and adds up what the ranks computed at its owner, own slice last
(CommFuse, arXiv 2604.24013, algorithms 1 and 2). Each step's transfer runs under the compute of
another slice, so with N ranks, t_c to compute a slice and t_p to move one, both take about
t_c + (N - 1) max(t_c, t_p). With m pieces transfers start before a slice is whole: where t_p > t_c,
about t_c / m + (N - 1) t_p.

What is computed is the caller's: a function of a part (rows of the whole) and a tensor of its rows.
It is not called for empty parts.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch.distributed as dist
from torch import Tensor

from interlace.decompose.functions.exchange import Link, PeerMessage
from interlace.decompose.order import Order, RowPart

Compute = Callable[[RowPart, Tensor], None]


def gather_slices(
    own: Tensor,
    order: Order,
    group: dist.ProcessGroup | None,
    compute: Compute,
    *,
    into: Tensor | None = None,
) -> None:
    """Calls `compute(part, values)` for all parts of all ranks' `own` [rows, ...], contiguous.

    `into` [total rows, ...], contiguous, receives all slices. Without it two slices of scratch do
    (with two ranks one), and `values` is only valid during the call.
    """
    link, last = Link(group), order.ranks - 1
    first = order.own.start
    scratch = []
    if into is not None:
        mine = into[order.own.start : order.own.stop]
        if mine.data_ptr() != own.data_ptr():
            mine.copy_(own)
    else:
        scratch = [_scratch(own, order) for _ in range(min(2, last))]

    def values(step: int, lane: int, piece: int) -> Tensor:
        part = order.gathered(step, lane, piece)
        if into is not None:
            return into[part.start : part.stop]
        if step == 0:
            return own[part.start - first : part.stop - first]
        return scratch[(step - 1) % 2][order.index(lane, piece)][: part.rows]

    lanes = range(len(order.directions))
    for step, piece in product(range(order.ranks), range(order.pieces)):
        if step > 0:
            link.received((step - 1, piece))
            if into is None and not order.straight:
                link.sent((step - 1, piece))  # from the buffer where the next slice will arrive
        if step < last:
            hops = [order.hop(step, lane) for lane in lanes]
            held = 0 if order.straight else step
            link.start(
                (step, piece),
                [PeerMessage(values(held, lane, piece), hops[lane].to) for lane in lanes],
                [PeerMessage(values(step + 1, lane, piece), hops[lane].source) for lane in lanes],
            )
        for lane in lanes:
            part = order.gathered(step, lane, piece)
            if part.rows:
                compute(part, values(step, lane, piece))
    link.finish()


def scatter_slices(
    result: Tensor,
    order: Order,
    group: dist.ProcessGroup | None,
    compute: Compute,
    *,
    filler: Iterator[None] | None = None,
) -> None:
    """Sums over all ranks what `compute(part, out)` writes to `out`; this rank's slice of the sum
    goes to `result` [rows, ...], contiguous.

    `filler` is other work: one item is computed before each of `waits(order)` waits, the rest at
    the end. Scratch: three slices (being computed, sent and received), with two ranks two.
    """
    filler = filler or iter(())
    if order.straight:
        _scatter_straight(result, order, group, compute, filler)
    else:
        _scatter_ring(result, order, group, compute, filler)


def waits(order: Order) -> int:
    """How many waits of a scatter can be filled with other work."""
    return (order.ranks - 1) * order.pieces


def _scatter_ring(
    result: Tensor,
    order: Order,
    group: dist.ProcessGroup | None,
    compute: Compute,
    filler: Iterator[None],
) -> None:
    """Partial sums travel: each rank adds its own and passes the sum on."""
    link, last = Link(group), order.ranks - 1
    scratch = [_scratch(result, order) for _ in range(min(2, last))]
    landing = _scratch(result, order) if last else result
    first = order.own.start

    def partial(step: int, lane: int, piece: int) -> Tensor:
        part = order.scattered(step, lane, piece)
        if step == last:
            return result[part.start - first : part.stop - first]
        return scratch[step % 2][order.index(lane, piece)][: part.rows]

    def arriving(step: int, lane: int, piece: int) -> Tensor:
        """The sum that the ranks before made of the part that this step visits."""
        part = order.scattered(step, lane, piece)
        return landing[order.index(lane, piece)][: part.rows]

    lanes = range(len(order.directions))
    for step, piece in product(range(order.ranks), range(order.pieces)):
        if step >= 2:
            link.sent((step - 2, piece))
        for lane in lanes:
            part = order.scattered(step, lane, piece)
            if part.rows:
                compute(part, partial(step, lane, piece))
        if step > 0:
            next(filler, None)
            link.received((step - 1, piece))
            for lane in lanes:
                partial(step, lane, piece).add_(arriving(step, lane, piece))
        if step < last:
            hops = [order.hop(step, lane) for lane in lanes]
            link.start(
                (step, piece),
                [PeerMessage(partial(step, lane, piece), hops[lane].to) for lane in lanes],
                [PeerMessage(arriving(step + 1, lane, piece), hops[lane].source) for lane in lanes],
            )
    _exhaust(filler)
    link.finish()


def _scatter_straight(
    result: Tensor,
    order: Order,
    group: dist.ProcessGroup | None,
    compute: Compute,
    filler: Iterator[None],
) -> None:
    """Partial results go straight to their owner. The first that arrives lands in `result`, the
    others are added to it as they come, the own one last."""
    link, last = Link(group), order.ranks - 1
    scratch = [_scratch(result, order) for _ in range(2)]
    landing = _scratch(result, order)
    own = order.own

    def partial(step: int, piece: int) -> Tensor:
        return scratch[step % 2][piece][: order.scattered(step, 0, piece).rows]

    for step, piece in product(range(order.ranks), range(order.pieces)):
        if step >= 2:
            link.sent((step - 2, piece))
        part = order.scattered(step, 0, piece)
        if part.rows:
            compute(part, partial(step, piece))
        start, stop = order.part(order.rank, piece)
        total = result[start - own.start : stop - own.start]
        if step > 0:
            next(filler, None)
            link.received((step - 1, piece))
        if step > 1:
            total.add_(landing[piece][: stop - start])
        if step < last:
            hop = order.hop(step, 0)
            arriving = landing[piece][: stop - start] if step else total
            sends, receives = (
                PeerMessage(partial(step, piece), hop.to),
                PeerMessage(arriving, hop.source),
            )
            link.start((step, piece), [sends], [receives])
        else:
            total.add_(partial(step, piece))
    _exhaust(filler)
    link.finish()


def _scratch(like: Tensor, order: Order) -> Tensor:
    """Room for one slice: [parts, rows of the longest part, ...]."""
    return like.new_empty((order.parts, order.longest, *like.shape[1:]))


def _exhaust(filler: Iterator[None]) -> None:
    for _ in filler:
        pass
