"""Where chunks of a model begin: at layers, so that the chunk with the head has no more to do."""

import re
from collections.abc import Mapping, Sequence

from interlace.errors import InputError
from interlace.strategy.pass_times import ChunkShape

_LAYER = re.compile(r"model\.blocks\.(\d+)")
"""A layer of the module that `interlace train` traces, which is a model with its loss."""


def even_cuts(layers: int, chunks: int, head_layers: float) -> tuple[int, ...]:
    """The first layer of each chunk. `head_layers`: by how many layers the head counts.

    Raises InputError for fewer layers than chunks."""
    if layers < chunks:
        raise InputError(
            f"model.layers = {layers} do not fill {chunks} chunks",
            hint="lower parallel.pipeline, or take a schedule with fewer chunks",
        )
    if chunks == 1:
        return (0,)
    others = chunks - 1

    def longest(last: int) -> tuple[float, int]:
        return max(-(-(layers - last) // others), last + head_layers), -last

    last = min(range(1, layers - others + 1), key=longest)
    least, more = divmod(layers - last, others)
    # Chunks that keep values for longest, the first ones, have fewer layers.
    sizes = [least + (number >= others - more) for number in range(others)]
    return tuple(sum(sizes[:number]) for number in range(chunks))


def given_cuts(split_at: Sequence[str], layers: int, chunks: int) -> tuple[int, ...]:
    """The first layers of chunks that begin with these sub-modules. Raises InputError for others
    than layers, and where they are not in order."""
    if len(split_at) != chunks - 1:
        raise InputError(
            f"pipeline.split_at names {len(split_at)} sub-modules, and the schedule has {chunks} "
            "chunks",
            hint="name those with which chunks begin, but the first",
        )
    found = [0]
    for name in split_at:
        match = _LAYER.fullmatch(name)
        if match is None or not found[-1] < int(match[1]) < layers:
            raise InputError(
                f"pipeline.split_at has {name!r}, and the simulation cuts in front of layers 1 to "
                f"{layers - 1}, in order",
                hint="write model.blocks.4, or leave pipeline.split_at out",
            )
        found.append(int(match[1]))
    return tuple(found)


def split_names(cuts: Sequence[int]) -> tuple[str, ...]:
    """The same as a run file has it."""
    return tuple(f"model.blocks.{layer}" for layer in cuts[1:])


def chunk_shapes(cuts: Sequence[int], layers: int, dense: int = 0) -> Mapping[int, ChunkShape]:
    """What each chunk has; the first `dense` layers are those without experts."""
    ends = (*cuts[1:], layers)
    return {
        number: ChunkShape(end - begin, number == len(cuts) - 1, max(0, min(end, dense) - begin))
        for number, (begin, end) in enumerate(zip(cuts, ends, strict=True))
    }
