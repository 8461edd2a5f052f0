"""One copy of a token for each rank that has experts of it, however many these are.

The copies, the *sends* of a rank, lie rank by rank and in the order of the tokens. They are
exchanged as rows are, as if each rank had one expert (counts [2, R] instead of [2, E]). Where they
arrive each is spread to the rows of its experts (`rows_of_sends`), and what the experts made of it
is added up there again, weighted, before one sum goes back (`sends_of_rows`). So a token's experts
are added up rank by rank, which is another order of additions than without merging.

Letters as in the package, and P = min(K, R), the most sends of a token.
"""

from itertools import accumulate
from math import comb
from typing import Any

import torch
from torch import Tensor

from interlace.experts.between_ranks import by_expert


def expected_sends(tokens: int, per_token: int, experts: int, ranks: int) -> int:
    """Sends of a rank where every choice of experts is as likely as any other; at least 1."""
    missed = comb(experts - experts // ranks, per_token) / comb(experts, per_token)
    return max(1, round(tokens * ranks * (1 - missed)))


@torch.library.custom_op("interlace::merged_sends", mutates_args=())
def merged_sends(
    ids_NK: Tensor, order: Tensor, experts: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(token of each send, sends of each token, sends to each rank, send of each row).

    The first [N P] is filled with 0 behind the last send; the second [N, P] holds places among the
    sends, and N P where a token has fewer; the third is [R]. The last [N K, 1] is for rows in
    `order`, those of `expert_order`: the place of its send among those to the same rank.
    """
    tokens, per_token = ids_NK.shape
    most = min(per_token, ranks)
    none = tokens * most
    rank_NK = ids_NK // (experts // ranks)  # `ranks` for a row that was dropped
    hit_NR = torch.zeros(tokens, ranks + 1, dtype=torch.bool, device=ids_NK.device)
    hit_NR = hit_NR.scatter_(1, rank_NK, True)[:, :ranks]
    sent_R = hit_NR.sum(0)
    # Sends are numbered rank by rank; what is no send is put behind all of them and cut off.
    number_NR = hit_NR.t().flatten().cumsum(0).view(ranks, tokens).t() - 1
    which_NR = torch.where(hit_NR, hit_NR.cumsum(1) - 1, most)
    token_NR = torch.arange(tokens, device=ids_NK.device).unsqueeze(1).expand(tokens, ranks)
    token = torch.zeros(none + 1, dtype=torch.int64, device=ids_NK.device)
    token.scatter_(0, torch.where(hit_NR, number_NR, none).flatten(), token_NR.flatten())
    place_NP = torch.full((tokens, most + 1), none, device=ids_NK.device)
    place_NP.scatter_(1, which_NR, torch.where(hit_NR, number_NR, none))
    within_NR = number_NR - (sent_R.cumsum(0) - sent_R)
    send_NK = within_NR.gather(1, rank_NK.clamp(max=ranks - 1)).to(torch.int32)
    of_rows = send_NK.flatten()[order].unsqueeze(1)
    return token[:none].clone(), place_NP[:, :most].contiguous(), sent_R, of_rows


@merged_sends.register_fake
def _(
    ids_NK: Tensor, order: Tensor, experts: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, per_token = ids_NK.shape
    most = min(per_token, ranks)
    return (
        order.new_empty(tokens * most),
        order.new_empty(tokens, most),
        order.new_empty(ranks),
        order.new_empty(order.shape[0], 1, dtype=torch.int32),
    )


@torch.library.custom_op("interlace::sends_of_tokens", mutates_args=())
def sends_of_tokens(
    x_ND: Tensor, token: Tensor, place_NP: Tensor, merged: Tensor, nominal: int
) -> Tensor:
    """[N, D] -> the sends of this rank, of which `merged` [2, R] says how many there are."""
    return x_ND.index_select(0, token[: int(merged[0].sum())])


@sends_of_tokens.register_fake
def _(x_ND: Tensor, token: Tensor, place_NP: Tensor, merged: Tensor, nominal: int) -> Tensor:
    return x_ND.new_empty(nominal, x_ND.shape[1])


@torch.library.custom_op("interlace::tokens_of_sends", mutates_args=())
def tokens_of_sends(sends: Tensor, token: Tensor, place_NP: Tensor, merged: Tensor) -> Tensor:
    """What came back for each send -> [N, D], the sum over the sends of each token."""
    out = sends.new_zeros(place_NP.shape[0], sends.shape[1])
    if len(sends):
        for place_N in place_NP.unbind(1):
            there_N1 = (place_N < len(sends)).unsqueeze(1)
            rows = sends.index_select(0, place_N.clamp(max=len(sends) - 1))
            out += torch.where(there_N1, rows, 0)
    return out


@tokens_of_sends.register_fake
def _(sends: Tensor, token: Tensor, place_NP: Tensor, merged: Tensor) -> Tensor:
    return sends.new_empty(place_NP.shape[0], sends.shape[1])


@torch.library.custom_op("interlace::rows_of_sends", mutates_args=())
def rows_of_sends(
    sends: Tensor, of_rows: Tensor, counts: Tensor, merged: Tensor, ranks: int, nominal: int
) -> Tensor:
    """Sends that arrived, rank by rank -> the rows of this rank's experts, [M, D]; `of_rows` [M, 1]
    is that of `merged_sends`, exchanged as rows are. Nominally there are `nominal` rows."""
    return sends.index_select(0, _sends(of_rows, counts, merged, ranks))


@rows_of_sends.register_fake
def _(
    sends: Tensor, of_rows: Tensor, counts: Tensor, merged: Tensor, ranks: int, nominal: int
) -> Tensor:
    return sends.new_empty(nominal, sends.shape[1])


@torch.library.custom_op("interlace::sends_of_rows", mutates_args=())
def sends_of_rows(
    rows: Tensor, of_rows: Tensor, counts: Tensor, merged: Tensor, ranks: int, nominal: int
) -> Tensor:
    """The way back: the sum over the rows of each send, added up in float32 at least."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    out = rows.new_zeros(int(merged[1].sum()), rows.shape[1], dtype=wide)
    index = _sends(of_rows, counts, merged, ranks)
    if rows.is_cuda:  # sorts first, so that additions have an order
        out.index_put_((index,), rows.to(wide), accumulate=True)
    else:
        out.index_add_(0, index, rows.to(wide))
    return out.to(rows.dtype)


@sends_of_rows.register_fake
def _(
    rows: Tensor, of_rows: Tensor, counts: Tensor, merged: Tensor, ranks: int, nominal: int
) -> Tensor:
    return rows.new_empty(nominal, rows.shape[1])


def _sends(of_rows: Tensor, counts: Tensor, merged: Tensor, ranks: int) -> Tensor:
    """The place of the send of each row, among all that arrived."""
    received, arrived = counts[1].tolist(), merged[1].tolist()
    starts = [end - own for end, own in zip(accumulate(arrived), arrived, strict=True)]
    experts = len(received) // ranks
    pieces = by_expert(experts, ranks)
    start = torch.tensor([starts[i // experts] for i in pieces], dtype=torch.int64)
    each = start.repeat_interleave(torch.tensor([received[i] for i in pieces]))
    return of_rows.flatten().to(torch.int64) + each.to(of_rows.device)


def _keep_tokens(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])


def _after_tokens(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return tokens_of_sends(gradient.contiguous(), *ctx.saved_tensors), None, None, None, None


def _keep_sends(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])
    ctx.nominal = inputs[0].shape[0]


def _after_sends(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    of_sends = sends_of_tokens(gradient.contiguous(), *ctx.saved_tensors, ctx.nominal)
    return of_sends, None, None, None


def _keep_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])
    ctx.ranks, ctx.nominal = inputs[4], inputs[0].shape[0]


def _after_spread(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    plain = (*ctx.saved_tensors, ctx.ranks, ctx.nominal)
    return sends_of_rows(gradient.contiguous(), *plain), None, None, None, None, None


def _after_sum(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    plain = (*ctx.saved_tensors, ctx.ranks, ctx.nominal)
    return rows_of_sends(gradient.contiguous(), *plain), None, None, None, None, None


sends_of_tokens.register_autograd(_after_tokens, setup_context=_keep_tokens)
tokens_of_sends.register_autograd(_after_sends, setup_context=_keep_sends)
rows_of_sends.register_autograd(_after_spread, setup_context=_keep_spread)
sends_of_rows.register_autograd(_after_sum, setup_context=_keep_spread)

SENDS = torch.ops.interlace.merged_sends.default
"""Operators, as they stand in traced graphs: the one that says what is sent,"""
RAGGED = frozenset(
    {
        torch.ops.interlace.sends_of_tokens.default,
        torch.ops.interlace.rows_of_sends.default,
        torch.ops.interlace.sends_of_rows.default,
    }
)
"""those whose results have as many rows as were routed,"""
TOKENS = torch.ops.interlace.tokens_of_sends.default
"""and the one behind which there is a row for each token again."""
