"""Proves that layouts on two meshes, found from the shapes of ranks' parts, are those that the
parts were cut by; or that they are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.errors import InputError
from interlace.reshard.planning.inferred_layouts import NamedMesh, infer_layouts

AXES = ("dp", "cp", "tp")


def mesh(sizes: dict[str, int], first: int = 0) -> NamedMesh:
    count = 1
    for size in sizes.values():
        count *= size
    return NamedMesh(ranks=tuple(range(first, first + count)), sizes=sizes)


def part(whole: tuple[int, ...], sizes: dict[str, int], cut: dict[str, int]) -> tuple[int, ...]:
    found = list(whole)
    for axis, dimension in cut.items():
        found[dimension] //= sizes.get(axis, 1)
    return tuple(found)


def test_sequence_parallel_to_data_parallel() -> None:
    """(batch, sequence / tp, width) to (batch / dp, sequence, width)."""
    found = infer_layouts("x", mesh({"tp": 2}), (4, 3, 5), mesh({"dp": 2}, first=2), (2, 6, 5))
    assert found.source.shape == found.destination.shape == (4, 6, 5)
    assert found.source.placements == ("S(1)",)
    assert found.destination.placements == ("S(0)",)
    assert found.source.box(1) == ((0, 4), (3, 6), (0, 5))
    assert found.destination.box(3) == ((2, 4), (0, 6), (0, 5))
    assert (found.leading, found.copied) == (0, ())


def test_an_axis_of_equal_width_keeps_its_ranks_apart() -> None:
    """Whatever rank i of dp holds goes to rank i of dp."""
    found = infer_layouts("x", mesh({"dp": 2, "tp": 2}), (4, 3), mesh({"dp": 2}, first=4), (4, 6))
    assert found.leading == 1
    assert found.source.placements == ("S(0)", "S(2)")
    assert found.source.box(2) == ((1, 2), (0, 4), (0, 3))
    assert found.destination.box(5) == ((1, 2), (0, 4), (0, 6))


def test_equal_parts_on_other_axes_are_taken_for_copies() -> None:
    """Tables that every rank has, such as rotary frequencies: fewest cuts."""
    found = infer_layouts("x", mesh({"tp": 2}), (1, 8), mesh({"dp": 2}, first=2), (1, 8))
    assert found.copied == ("tp", "dp")
    assert found.source.placements == found.destination.placements == ("R",)


@pytest.mark.parametrize(
    ("source", "destination", "words"),
    [((4, 6), (4, 5), "no layout fits"), ((4, 6), (4, 6, 1), "no layout fits"),
     ((2, 4), (4, 2), "no layout fits")],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(
    source: tuple[int, ...], destination: tuple[int, ...], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        infer_layouts("x", mesh({"tp": 2}), source, mesh({"tp": 3}, first=2), destination)


@given(st.data())
def test_cuts_are_found_again(data: st.DataObject) -> None:
    """Of tensors whose dimensions tell axes apart: layouts give every rank the part that it has,
    and one that needs no more cuts than the true one."""
    rank = data.draw(st.integers(1, 3))
    sizes = [
        {axis: data.draw(st.sampled_from((1, 2, 3)), label=axis) for axis in AXES} for _ in range(2)
    ]
    cut = {
        axis: data.draw(st.integers(0, rank - 1))
        for axis in AXES
        if data.draw(st.booleans(), label=f"{axis} cuts")
    }
    whole = tuple(216 * prime for prime in (5, 7, 11)[:rank])
    parts = [part(whole, each, cut) for each in sizes]
    ends = mesh(sizes[0]), mesh(sizes[1], first=27)
    try:
        found = infer_layouts("x", ends[0], parts[0], ends[1], parts[1])
    except InputError as error:
        assert "several layouts" in error.message  # noqa: PT017
        return
    for layout, shape in zip((found.source, found.destination), parts, strict=True):
        for holder in layout.ranks:
            box = layout.box(holder)
            assert box is not None
            assert tuple(stop - start for start, stop in box)[found.leading :] == shape
    others = [axis for axis in AXES if sizes[0][axis] != sizes[1][axis]]
    assert len(others) - len(found.copied) <= sum(axis in cut for axis in others)


def test_axes_whose_ranks_hold_the_same_are_copies() -> None:
    """An equally wide axis is one of the parts of a tensor, unless its ranks are known to be
    alike."""
    ends = mesh({"dp": 2, "tp": 2}), mesh({"dp": 2, "tp": 2}, first=4)
    unknown = infer_layouts("x", ends[0], (4, 6), ends[1], (4, 6))
    assert (unknown.source.shape, unknown.leading, unknown.copied) == ((2, 2, 4, 6), 2, ())
    known = infer_layouts("x", ends[0], (4, 6), ends[1], (4, 6), alike=["tp"])
    assert (known.source.shape, known.leading, known.copied) == ((2, 4, 6), 1, ("tp",))
    assert known.source.placements == known.destination.placements == ("S(0)", "R")
