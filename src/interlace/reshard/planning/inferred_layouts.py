"""Layouts of a tensor on two meshes, from the shapes of the parts that ranks hold.

Two programs with the same model code hold parts of the same tensor, laid out by axes of the same
names. An axis that is equally wide on both meshes needs no answer: what its rank i holds on one
mesh, its rank i holds on the other, whatever that is; unless its ranks are known to hold the same,
which need not be sent by all of them then. Any other axis either cuts one dimension, the same on
both meshes, or its ranks hold the same; the whole tensor must come out alike. Where several layouts
fit, that with the fewest cuts is taken: it takes parts of the source for copies at worst, and who
moves the tensor can compare these.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from interlace.errors import InputError
from interlace.reshard.planning.layout import Layout

_Cuts = Mapping[str, int | None]
"""By axis: the dimension that it cuts, or None if its ranks hold the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedMesh:
    """Ranks along named axes."""

    ranks: tuple[int, ...]
    """Global ranks in row-major order."""
    sizes: Mapping[str, int]
    """By axis, from the outermost."""

    def __str__(self) -> str:
        """`tp 2 (ranks 0, 1)`."""
        axes = " x ".join(f"{name} {size}" for name, size in self.sizes.items())
        return f"{axes} (ranks {', '.join(map(str, self.ranks))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferredLayouts:
    """Of one tensor, before and after it moves."""

    source: Layout
    destination: Layout
    leading: int
    """Dimensions that both layouts have in front of those of the tensor, one for each axis that is
    equally wide and whose ranks may differ; a rank's part has size 1 in each."""
    copied: tuple[str, ...]
    """Axes of either mesh whose ranks hold the same."""


def infer_layouts(
    name: str,
    source: NamedMesh,
    source_part: Sequence[int],
    destination: NamedMesh,
    destination_part: Sequence[int],
    alike: Collection[str] = (),
) -> InferredLayouts:
    """The layouts of a tensor of which ranks of `source` hold parts of one shape, and those of
    `destination` parts of another. The ranks of `alike` axes are known to hold the same.

    Raises InputError if no layouts fit, or several with equally few cuts do."""
    equal = [
        axis for axis, size in source.sizes.items() if destination.sizes.get(axis, 1) == size > 1
    ]
    matched = [axis for axis in equal if axis not in alike]
    known: _Cuts = {axis: None for axis in equal if axis in alike}
    others = [
        axis
        for axis in dict.fromkeys((*source.sizes, *destination.sizes))
        if source.sizes.get(axis, 1) != destination.sizes.get(axis, 1)
    ]
    found: list[tuple[_Cuts, tuple[int, ...]]] = []
    if len(source_part) == len(destination_part):
        for chosen in product((None, *range(len(source_part))), repeat=len(others)):
            cuts = {**known, **dict(zip(others, chosen, strict=True))}
            whole = _whole(source_part, source, cuts)
            if whole == _whole(destination_part, destination, cuts):
                found.append((cuts, whole))
    fewest = min((_count(cuts) for cuts, _ in found), default=0)
    found = [(cuts, whole) for cuts, whole in found if _count(cuts) == fewest]
    if len(found) != 1:
        raise InputError(
            f"{name} is {list(source_part)} on each rank of {source} and "
            f"{list(destination_part)} on each of {destination}, and "
            + ("no layout fits both" if not found else "several layouts fit both"),
            hint="begin stages with whole sub-modules, whose inputs all ranks of an axis hold "
            "alike or in equal parts, or give both stages the same axes",
        )
    ((cuts, whole),) = found
    return InferredLayouts(
        source=_layout(source, matched, cuts, whole),
        destination=_layout(destination, matched, cuts, whole),
        leading=len(matched),
        copied=tuple(axis for axis, cut in cuts.items() if cut is None),
    )


def _count(cuts: _Cuts) -> int:
    return sum(cut is not None for cut in cuts.values())


def _whole(part: Sequence[int], mesh: NamedMesh, cuts: _Cuts) -> tuple[int, ...]:
    return tuple(
        size * prod(mesh.sizes.get(axis, 1) for axis, cut in cuts.items() if cut == dimension)
        for dimension, size in enumerate(part)
    )


def _layout(mesh: NamedMesh, matched: Sequence[str], cuts: _Cuts, whole: tuple[int, ...]) -> Layout:
    placements = []
    for axis in mesh.sizes:
        cut = cuts.get(axis)
        if axis in matched:
            placements.append(f"S({matched.index(axis)})")
        else:
            placements.append("R" if cut is None else f"S({cut + len(matched)})")
    return Layout(
        shape=(*(mesh.sizes[axis] for axis in matched), *whole),
        ranks=mesh.ranks,
        mesh_shape=tuple(mesh.sizes.values()),
        placements=tuple(placements),
    )
