"""Rows to the ranks that hold their experts, and back, with exact counts.

Ranks first tell each other how many rows they will send to each expert (`received_counts`); the
host reads that once (`host_counts`), and both directions of both passes go by it. The gradient of
an exchange is the exchange back.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

_functional = torch.ops._c10d_functional


def received_counts(sent_E: Tensor, ranks: int, group: str) -> Tensor:
    """[E] rows that this rank has for each expert -> [R L]: those that each rank has for this
    rank's experts. Collective."""
    own = [sent_E.shape[0] // ranks] * ranks
    return _functional.wait_tensor(_functional.all_to_all_single(sent_E, own, own, group))


@torch.library.custom_op("interlace::host_counts", mutates_args=())
def host_counts(sent_E: Tensor, received_RL: Tensor) -> Tensor:
    """Both counts as one tensor [2, E] in the memory of the host, which waits for them here."""
    return torch.stack((sent_E, received_RL)).to("cpu")


@host_counts.register_fake
def _(sent_E: Tensor, received_RL: Tensor) -> Tensor:
    return torch.empty(2, sent_E.shape[0], dtype=sent_E.dtype, device="cpu")


def to_experts(rows: Tensor, counts: Tensor, ranks: int, group: str) -> Tensor:
    """[N K, D] sorted by expert -> what arrives for this rank's experts; nominally as many rows."""
    return _exchanged(rows, counts, ranks, rows.shape[0], True, group)


def to_tokens(rows: Tensor, counts: Tensor, ranks: int, token_rows: int, group: str) -> Tensor:
    """The way back -> [token_rows, D]; rows that were not sent are 0."""
    return _exchanged(rows, counts, ranks, token_rows, False, group)


def sends_to_ranks(sends: Tensor, merged: Tensor, ranks: int, group: str) -> Tensor:
    """Sends of this rank -> those that arrive from all, rank by rank (`merged_sends`); `merged` are
    counts [2, R]. Nominally as many."""
    return _exchanged(sends, merged, ranks, AS_SENT, True, group)


def sends_back(sends: Tensor, merged: Tensor, ranks: int, group: str) -> Tensor:
    """The way back, for as many sends as this rank had."""
    return _exchanged(sends, merged, ranks, AS_SENT, False, group)


AS_SENT = -1
"""In place of a number of rows: as many as were sent there, which is known at run time only."""


@torch.library.custom_op("interlace::expert_exchange", mutates_args=())
def expert_exchange(
    rows: Tensor, counts: Tensor, ranks: int, rows_out: int, forth: bool, group_name: str
) -> Tensor:
    """Rows from the side of the tokens to that of the experts (`forth`), or back. Traced graphs
    start it by `graphs.expert_messages`, and wait where the plan says; called by itself, as here,
    it is one all-to-all and a copy that sorts."""
    sent, received = (each.view(ranks, -1) for each in counts)
    by_rank = sent.sum(1).tolist(), received.sum(1).tolist()
    pieces, order = received.flatten().tolist(), by_expert(received.shape[1], ranks)
    if forth:
        arrived = _all_to_all(rows[: sum(by_rank[0])], by_rank[1], by_rank[0], group_name)
        return in_order(arrived, pieces, order)
    back_again = [order.index(i) for i in range(len(order))]
    leaving = in_order(rows, [pieces[i] for i in order], back_again)
    back = _all_to_all(leaving, by_rank[0], by_rank[1], group_name)
    return back if len(back) >= rows_out else padded(back, rows_out)


@expert_exchange.register_fake
def _(
    rows: Tensor, counts: Tensor, ranks: int, rows_out: int, forth: bool, group_name: str
) -> Tensor:
    return rows.new_empty(rows.shape[0] if rows_out == AS_SENT else rows_out, rows.shape[1])


COUNTS = torch.ops.interlace.host_counts.default
"""Operators, as they stand in traced graphs."""
EXCHANGE = torch.ops.interlace.expert_exchange.default


def padded(rows: Tensor, count: int) -> Tensor:
    """`count` rows, of which those behind the given ones are 0."""
    out = rows.new_zeros(count, *rows.shape[1:])
    out[: len(rows)] = rows
    return out


def by_expert(experts: int, ranks: int) -> list[int]:
    """Pieces numbered rank by rank, `experts` of each rank, in the order in which they lie on the
    side of the experts: expert by expert."""
    return [rank * experts + expert for expert in range(experts) for rank in range(ranks)]


def in_order(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """A copy of rows that are pieces of these sizes, with the pieces in another order."""
    pieces = rows.split(list(sizes))
    return torch.cat([pieces[i] for i in order])


def _all_to_all(rows: Tensor, arriving: list[int], leaving: list[int], group: str) -> Tensor:
    out = _functional.all_to_all_single(rows.contiguous(), arriving, leaving, group)
    return _functional.wait_tensor(out)


class _Exchange(Function):
    """An exchange; its gradient takes the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, counts: Tensor, ranks: int, rows_out: int, forth: bool, group: str
    ) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.plain = ranks, AS_SENT if rows_out == AS_SENT else rows.shape[0], not forth, group
        return _functional.wait_tensor(expert_exchange(rows, counts, ranks, rows_out, forth, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (counts,) = ctx.saved_tensors
        back = expert_exchange(gradient.contiguous(), counts, *ctx.plain)
        return _functional.wait_tensor(back), None, None, None, None, None


def _exchange(
    rows: Tensor, counts: Tensor, ranks: int, rows_out: int, forth: bool, group: str
) -> Tensor:
    return _Exchange.apply(rows, counts, ranks, rows_out, forth, group)


# Autograd itself traces it, forward and backward, operator by operator (`parallel.in_graph`).
_exchanged = cast("Callable[..., Tensor]", torch.compiler.allow_in_graph(_exchange))
