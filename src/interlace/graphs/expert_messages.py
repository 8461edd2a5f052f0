"""The exchange of rows between tokens and experts, started: one message per rank and expert.

Each message lands where its rows are needed, so nothing is sorted on arrival. Both ends know the
counts (`experts.between_ranks`), and what is empty is not sent.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.experts.between_ranks import by_expert
from interlace.graphs.gloo_messages import Messages
from interlace.graphs.torch_private import process_group


def start_rows(
    rows: Tensor, counts: Tensor, ranks: int, rows_out: int, forth: bool, group_name: str
) -> tuple[Tensor, Messages, Tensor]:
    """(what arrives, the messages, what is sent), of which neither tensor may be touched before the
    messages have ended. Arguments are those of `experts.between_ranks.expert_exchange`."""
    group = process_group(group_name)
    sent, received = (each.tolist() for each in counts)
    own = len(sent) // ranks
    tokens = _places(sent, range(len(sent)))
    experts = _places(received, by_expert(own, ranks))
    rows = rows.contiguous()
    # Of a group of experts `rows_out` is nominal, and more may have been sent.
    out = rows.new_empty(sum(received) if forth else max(rows_out, sum(sent)), rows.shape[1])
    if not forth:
        out[sum(sent) :] = 0
    leaving, arriving = (tokens, experts) if forth else (experts, tokens)
    return out, _messages(rows, leaving, out, arriving, own, group), rows


def evenly(rows: Tensor, rest: tuple[Any, ...], count: int) -> tuple[Tensor, tuple[Any, ...]]:
    """Operands of an exchange of about `count` rows, as many for each expert of each rank; `rest`
    are the arguments behind `rows` of an exchange."""
    counts, ranks, _, forth, group_name = rest
    each = max(1, round(count / counts.shape[1]))
    total = each * counts.shape[1]
    even = torch.full_like(counts, each)
    return rows.new_ones(total, rows.shape[1]), (even, ranks, total, forth, group_name)


def _places(counts: Sequence[int], order: Iterable[int]) -> list[slice]:
    """Where the rows of each (rank, expert) lie, if they lie behind each other in `order`."""
    order = list(order)
    ends = accumulate(counts[i] for i in order)
    found = {i: slice(end - counts[i], end) for i, end in zip(order, ends, strict=True)}
    return [found[i] for i in range(len(counts))]


def _messages(
    rows: Tensor,
    leaving: Sequence[slice],
    out: Tensor,
    arriving: Sequence[slice],
    own: int,
    group: dist.ProcessGroup,
) -> Messages:
    """Receives first (`graphs.gloo_messages`), each rank beginning with another peer."""
    rank, ranks = group.rank(), group.size()
    others = [(rank + distance) % ranks for distance in range(1, ranks)]
    receives = [(r, out[arriving[r * own + e]]) for r in reversed(others) for e in range(own)]
    sends = [(r, rows[leaving[r * own + e]]) for r in others for e in range(own)]
    messages = [dist.P2POp(dist.irecv, x, group=group, group_peer=r) for r, x in receives if len(x)]
    messages += [dist.P2POp(dist.isend, x, group=group, group_peer=r) for r, x in sends if len(x)]
    works = dist.batch_isend_irecv(messages) if messages else []
    for e in range(rank * own, (rank + 1) * own):
        out[arriving[e]] = rows[leaving[e]]
    return Messages(works, out, in_streams=rows.device.type != "cpu")
