"""Proves that layouts cut as DTensor does: `torch.chunk` per axis, left to right or strided."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_worlds import layouts

from interlace.errors import InputError
from interlace.reshard.planning.layout import Layout, intersection


def layout(shape: tuple[int, ...], mesh: tuple[int, ...], *placements: str) -> Layout:
    ranks = tuple(range(prod(mesh)))
    return Layout(shape=shape, ranks=ranks, mesh_shape=mesh, placements=placements)


def test_known_cuts() -> None:
    """5 over 4 is 2, 2, 1, 0, as torch.chunk; two axes on one dimension in both orders."""
    assert list(layout((5,), (4,), "S(0)").boxes().values()) == [
        ((0, 2),),
        ((2, 4),),
        ((4, 5),),
        ((5, 5),),
    ]
    boxes = {"S(0)": [(0, 2), (2, 4), (4, 6), (6, 8)], "_S(0)": [(0, 2), (4, 6), (2, 4), (6, 8)]}
    for first, cuts in boxes.items():
        found = layout((8,), (2, 2), first, "S(0)").boxes().values()
        assert list(found) == [(cut,) for cut in cuts]
    assert layout((), (2,), "R").boxes() == {0: (), 1: ()}
    assert layout((4, 6), (2, 3), "S(1)", "S(0)").box(4) == ((2, 4), (3, 6))
    assert layout((4, 6), (2, 3), "S(1)", "S(0)").box(6) is None


@settings(max_examples=300, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(0, 9), max_size=3))
def test_tiles_cover_the_tensor_once(data: st.DataObject, shape: list[int]) -> None:
    """Different tiles are disjoint, together the tensor, and equally often held."""
    at = data.draw(layouts(tuple(shape), 16))
    tiles = at.tiles()
    assert sum(prod(b - a for a, b in box) for box in tiles) == prod(shape)
    boxes = list(tiles)
    assert all(intersection(one, two) is None for i, one in enumerate(boxes) for two in boxes[:i])
    for box, ranks in tiles.items():
        assert all(at.box(rank) == box and at.replicas(rank) == ranks for rank in ranks)


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(0, 40),
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_axes_cut_the_pieces_of_the_axis_before(size: int, mesh: list[int]) -> None:
    """Several axes on one dimension against nested lists cut by a plain loop."""

    def chunks(items: list[int], n: int) -> list[list[int]]:
        each = max(1, -(-len(items) // n))
        return [items[i * each : (i + 1) * each] for i in range(n)]

    pieces = [list(range(size))]
    for n in mesh:
        pieces = [part for piece in pieces for part in chunks(piece, n)]
    boxes = layout((size,), tuple(mesh), *["S(0)"] * len(mesh)).boxes()
    for piece, ((start, stop),) in zip(pieces, boxes.values(), strict=True):
        assert list(range(start, stop)) == piece


def test_impossible_layouts_are_refused() -> None:
    """Counts that differ, placements and dimensions that do not exist, ranks named twice."""
    good = {"shape": (4, 4), "ranks": (0, 1), "mesh_shape": (2,), "placements": ("R",)}
    Layout(**good)
    wrong = {
        "2 ranks": {"mesh_shape": (3,)},
        "2 placements": {"placements": ("R", "R")},
        "unknown placement 'S0'": {"placements": ("S0",)},
        "of 2 dimensions": {"placements": ("S(2)",)},
        "must be different": {"ranks": (1, 1)},
        "negative size": {"shape": (-1, 4)},
    }
    for message, change in wrong.items():
        with pytest.raises(InputError, match=message):
            Layout(**{**good, **change})
