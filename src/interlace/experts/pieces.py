"""Rows of some experts of each rank, taken from rows of all, and put together again.

With them an exchange is cut into several, each with the rows of its share of every rank's experts
(`decompose.rewrite.expert_groups`). Counts of a piece are those of the layer, 0 for all experts
that are not in it, so operators on rows take them as they take those of all experts. `nominal` is
the number of rows that a tracer sees. `first` and `last` are experts of a rank, from first on and
before last. None of these operators has a gradient: they are written into graphs that are traced.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op("interlace::counts_of_piece", mutates_args=())
def counts_of_piece(counts: Tensor, ranks: int, first: int, last: int) -> Tensor:
    """Counts [2, E], 0 for experts of other pieces."""
    out = torch.zeros_like(counts)
    by_rank, whole = out.view(2, ranks, -1), counts.view(2, ranks, -1)
    by_rank[:, :, first:last] = whole[:, :, first:last]
    return out


@counts_of_piece.register_fake
def _(counts: Tensor, ranks: int, first: int, last: int) -> Tensor:
    return torch.empty_like(counts)


@torch.library.custom_op("interlace::token_rows_of_piece", mutates_args=())
def token_rows_of_piece(
    rows: Tensor, counts: Tensor, ranks: int, first: int, last: int, nominal: int
) -> Tensor:
    """On the side of the tokens: a copy of the rows for these experts of each rank, in order."""
    spans = _spans(counts[0].tolist(), ranks, first, last)
    return torch.cat([rows[start:end] for start, end in spans])


@token_rows_of_piece.register_fake
def _(rows: Tensor, counts: Tensor, ranks: int, first: int, last: int, nominal: int) -> Tensor:
    return rows.new_empty(nominal, rows.shape[1])


_VIEW = "interlace::expert_rows_of_piece"
torch.library.define(
    _VIEW,
    "(Tensor(a) rows, Tensor counts, int ranks, int first, int last, int start, int nominal)"
    " -> Tensor(a)",
)


@torch.library.impl(_VIEW, ("CPU", "CUDA"))
def _expert_rows_of_piece(
    rows: Tensor, counts: Tensor, ranks: int, first: int, last: int, start: int, nominal: int
) -> Tensor:
    """On the side of the experts: the rows of these experts, which lie behind each other. A view;
    `start` is where it would begin if rows were the nominal ones."""
    of_expert = counts[1].view(ranks, -1).sum(0)
    return rows.narrow(0, int(of_expert[:first].sum()), int(of_expert[first:last].sum()))


@torch.library.register_fake(_VIEW)
def _(
    rows: Tensor, counts: Tensor, ranks: int, first: int, last: int, start: int, nominal: int
) -> Tensor:
    return rows.narrow(0, start, nominal)


@torch.library.custom_op("interlace::token_rows_of_pieces", mutates_args=())
def token_rows_of_pieces(
    pieces: Sequence[Tensor], counts: Tensor, ranks: int, ends: Sequence[int], rows_out: int
) -> Tensor:
    """On the side of the tokens: the rows of all pieces in the order of the experts,
    [rows_out, D]. Rows that have no expert are 0. Piece i has the experts before `ends[i]`."""
    out = pieces[0].new_zeros(rows_out, pieces[0].shape[1])
    first = 0
    sent = counts[0].tolist()
    for piece, last in zip(pieces, ends, strict=True):
        taken = 0
        for start, end in _spans(sent, ranks, first, last):
            out[start:end] = piece[taken : taken + end - start]
            taken += end - start
        first = last
    return out


@token_rows_of_pieces.register_fake
def _(
    pieces: Sequence[Tensor], counts: Tensor, ranks: int, ends: Sequence[int], rows_out: int
) -> Tensor:
    return pieces[0].new_empty(rows_out, pieces[0].shape[1])


def _spans(sent: Sequence[int], ranks: int, first: int, last: int) -> list[tuple[int, int]]:
    """Where the rows for experts from `first` on and before `last` lie, for each rank."""
    own = len(sent) // ranks
    starts = [sum(sent[: rank * own + first]) for rank in range(ranks)]
    counts = [sum(sent[rank * own + first : rank * own + last]) for rank in range(ranks)]
    return [(start, start + count) for start, count in zip(starts, counts, strict=True)]


COUNTS_OF_PIECE = torch.ops.interlace.counts_of_piece.default
"""The operators, as they stand in graphs."""
TOKEN_ROWS = torch.ops.interlace.token_rows_of_piece.default
EXPERT_ROWS = torch.ops.interlace.expert_rows_of_piece.default
MERGED = torch.ops.interlace.token_rows_of_pieces.default
