"""What the functions of this package accept; anything else raises InputError before any transfer.

Only what one rank can see is checked. Ranks that disagree with each other are not noticed.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.decompose.order import VARIANTS, Order, Variant
from interlace.errors import InputError, nearest

_LAYOUT = "weights have the layout of torch.nn.Linear, [out, in]"
"""Hint where a shape is wrong."""


def rank_and_ranks(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's place in the group, and the group's size."""
    if not dist.is_initialized():
        raise InputError(
            "there is no process group yet", hint="call torch.distributed.init_process_group"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise InputError(
            f"rank {dist.get_rank()} is not in the process group that was given",
            hint="call this only on the ranks that new_group got",
        )
    return rank, dist.get_world_size(group)


def gather_order(
    rows: int,
    inner: int,
    group: dist.ProcessGroup | None,
    variant: str,
    pieces: int,
    rows_per_rank: Sequence[int] | None,
) -> Order:
    """The order in which to gather this rank's `rows` rows and those of the others; each is `inner`
    rows of a matrix."""
    rank, ranks = rank_and_ranks(group)
    rows_per_rank = [rows] * ranks if rows_per_rank is None else rows_per_rank
    _check_rows(rows_per_rank, ranks)
    if rows_per_rank[rank] != rows:
        raise InputError(
            f"rows_per_rank says {rows_per_rank[rank]} rows for rank {rank}, which has {rows}",
            hint="rows_per_rank holds the rows of each rank, the same list on all ranks",
        )
    return _order(variant, pieces, rank, rows_per_rank, inner=inner)


def scatter_order(
    rows: int,
    inner: int,
    group: dist.ProcessGroup | None,
    variant: str,
    pieces: int,
    rows_per_rank: Sequence[int] | None,
) -> Order:
    """The order in which to scatter `rows` rows, each of which is `inner` rows of a matrix. Without
    `rows_per_rank` all ranks get as many."""
    rank, ranks = rank_and_ranks(group)
    if rows_per_rank is None:
        if rows % ranks:
            raise InputError(
                f"{rows} rows cannot be divided equally among {ranks} ranks",
                hint="pass rows_per_rank, the rows that each rank gets",
            )
        rows_per_rank = [rows // ranks] * ranks
    _check_rows(rows_per_rank, ranks)
    if sum(rows_per_rank) != rows:
        raise InputError(
            f"rows_per_rank adds up to {sum(rows_per_rank)}, but there are {rows} rows",
            hint="rows_per_rank holds the rows that each rank gets, the same list on all ranks",
        )
    return _order(variant, pieces, rank, rows_per_rank, inner=inner)


def check_matmul(x: Tensor, weights: Sequence[Tensor]) -> None:
    """`x @ weight.T` must be possible for every weight, without a conversion."""
    if x.dim() < 2:
        raise InputError(f"x has shape {tuple(x.shape)}", hint="x must be [rows, ..., in]")
    if not weights:
        raise InputError("there is no weight", hint="pass a weight or a list of weights")
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise InputError(
                f"a weight {tuple(weight.shape)} cannot take the {x.shape[-1]} features of x "
                f"{tuple(x.shape)}",
                hint=_LAYOUT,
            )
    check_alike(x, *weights)


def check_alike(*tensors: Tensor) -> None:
    """All must be floating point, of one dtype and on one device."""
    for one, other in pairwise(tensors):
        if one.dtype != other.dtype or one.device != other.device:
            raise InputError(
                f"tensors differ: {one.dtype} on {one.device}, {other.dtype} on {other.device}",
                hint="convert them to one dtype and device",
            )
    if not tensors[0].is_floating_point():
        raise InputError(
            f"tensors are {tensors[0].dtype}", hint="pass a floating-point dtype, as torch.bfloat16"
        )


def check_pieces(pieces: int) -> None:
    """A slice has at least one piece."""
    if not isinstance(pieces, int) or pieces < 1:
        raise InputError(f"pieces = {pieces!r}", hint="set an integer of at least 1")


def is_differentiated(*tensors: Tensor) -> bool:
    """Whether autograd will want a gradient of any of these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _check_rows(rows: Sequence[int], ranks: int) -> None:
    if len(rows) != ranks or any(count < 0 for count in rows):
        raise InputError(
            f"rows_per_rank = {list(rows)} in a group of {ranks} ranks",
            hint="pass one number of rows for each rank of the group, 0 or more",
        )


def _order(variant: str, pieces: int, rank: int, rows: Sequence[int], *, inner: int) -> Order:
    check_pieces(pieces)
    if variant not in VARIANTS:
        raise InputError(f"unknown variant {variant!r}", hint=nearest(str(variant), VARIANTS))
    scaled = tuple(count * inner for count in rows)
    return Order(variant=cast("Variant", variant), rank=rank, rows=scaled, pieces=pieces)
