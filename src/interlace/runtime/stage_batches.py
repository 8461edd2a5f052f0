"""Whether ranks of stages that are laid out differently were given the same samples.

Ranks along a data axis hold consecutive rows of each tensor of a micro-batch. If a stage was given
rows in another order than the next, every number of the step would be that of other samples.
"""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from interlace.errors import InputError
from interlace.ranks.replicas import fingerprints
from interlace.ranks.small_collectives import gather_json
from interlace.runtime.stage_meshes import DATA_AXES, StageMeshes

_Rows = tuple[str, ...]


def check_same_samples(batch: Sequence[Tensor], stages: StageMeshes) -> None:
    """Raise InputError, on all ranks alike, unless each tensor of this micro-batch is the same for
    all stages: its rows, over the ranks of data axes put together, or what every rank holds whole.
    Collective on the default group."""
    own = [_rows(tensor) for tensor in batch]
    of_ranks = [
        [tuple(rows) for rows in said] for said in gather_json([list(rows) for rows in own], None)
    ]
    for place in range(len(batch)):
        held = {rank: of_ranks[rank][place] for rank in range(dist.get_world_size())}
        if len(set(held.values())) == 1:
            continue
        seen = [_joined(held, stages, number) for number in range(len(stages.meshes))]
        for number, each in enumerate(seen):
            if each != seen[0]:
                raise InputError(
                    f"tensor {place} of the first micro-batch is not the same for stages 0 and "
                    f"{number}: {stages.meshes[0]}, {stages.meshes[number]}",
                    hint="give each rank its rows of one and the same micro-batch: the ranks of "
                    f"{' and '.join(DATA_AXES)} of a stage hold consecutive ones, as by "
                    "torch.chunk, and all other ranks of a stage the same",
                )


def _joined(held: Mapping[int, _Rows], stages: StageMeshes, number: int) -> set[_Rows]:
    """The whole tensor of a stage, one for each place on axes that are no data axes."""
    found: dict[tuple[int, ...], _Rows] = {}
    for rank in stages.meshes[number].ranks:
        place = stages.place(rank)
        other = tuple(at for axis, at in place.items() if axis not in DATA_AXES)
        found[other] = (*found.get(other, ()), *held[rank])
    return set(found.values())


def _rows(tensor: Tensor) -> list[str]:
    """A digest of each row, or of the whole if it has none."""
    rows = tensor.detach().unbind() if tensor.ndim else (tensor.detach(),)
    return [each.hex() for each in fingerprints(rows)]
