"""Whether all ranks have micro-batches of the same shape at a step, before they run it."""

from collections.abc import Callable, Sequence

import torch.distributed as dist

from interlace.errors import InputError, PeerError
from interlace.ranks.agree import listed
from interlace.ranks.small_collectives import alone, gather_json


def agree_on_shape(
    own: Callable[[], str], group: dist.ProcessGroup | None = None, *, hint: str
) -> str:
    """What `own` gives on all ranks: this rank's micro-batches in words.

    Steps of different shapes have different graphs, of which collectives would not fit together.
    Collective on a group, by default all ranks. Raises InputError on a rank whose `own` does, and
    PeerError on the others, and on all ranks, naming them, if they have different micro-batches.
    """
    if alone(group):
        return own()
    mine, refused = "", None
    try:
        mine = own()
    except InputError as error:
        refused = error
    told = {"has": mine, "refused": "" if refused is None else refused.message}
    of_ranks = gather_json(told, group)
    if refused is not None:
        raise refused
    places = [each if group is None else dist.get_global_rank(group, each)
              for each in range(len(of_ranks))]  # fmt: skip
    for place, other in zip(places, of_ranks, strict=True):
        if other["refused"]:
            raise PeerError(f"rank {place} refused: {other['refused']}", ranks=[place], hint=hint)
    refuse_difference([each["has"] for each in of_ranks], places, hint)
    return mine


def refuse_difference(shapes: Sequence[str], places: Sequence[int], hint: str) -> None:
    """Raise PeerError, naming ranks, unless what these ranks have at a step is the same in words.
    What the fewest have is at fault."""
    ranks_of: dict[str, list[int]] = {}
    for place, shape in zip(places, shapes, strict=True):
        ranks_of.setdefault(shape, []).append(place)
    if len(ranks_of) == 1:
        return
    usual = max(ranks_of.values(), key=len)
    odd = [rank for ranks in ranks_of.values() if ranks is not usual for rank in ranks]
    told = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}: {shape}"
        for shape, ranks in ranks_of.items()
    )
    raise PeerError(f"ranks have different micro-batches at one step: {told}", ranks=odd, hint=hint)
