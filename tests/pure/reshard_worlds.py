"""Random layouts, topologies and the paper's cases; a plan walked with plain arrays."""

from math import prod

import numpy as np
from hypothesis import strategies as st

from interlace.hardware.topology import Topology
from interlace.reshard.planning.layout import Layout
from interlace.reshard.planning.transfer_plan import TensorSpec, TransferPlan, sub_boxes

# Case: (source hosts x devices, mesh axes per tensor dimension, the same of the destination).
PAPER = {
    1: ((2, 4), ("0", "", ""), (2, 4), ("0", "", "")),
    2: ((2, 4), ("", "", ""), (2, 4), ("0", "", "")),
    3: ((2, 4), ("", "0", ""), (2, 4), ("0", "", "")),
    4: ((2, 4), ("", "01", ""), (2, 4), ("01", "", "")),
    5: ((2, 4), ("1", "", ""), (2, 4), ("0", "", "")),
    6: ((2, 4), ("0", "", ""), (3, 4), ("0", "", "")),
    7: ((1, 4), ("1", "", ""), (2, 4), ("", "", "")),
    9: ((2, 4), ("", "0", ""), (2, 4), ("", "", "0")),
}
TEN_GBIT = 1.25e9
"""Bytes per second of the paper's network ports."""


def paper_case(number: int) -> tuple[TensorSpec, Topology]:
    """One n-to-m case, links inside hosts as good as free."""
    source, cut, destination, cut_to = PAPER[number]
    shape = (3072, 1024, 170) if number == 6 else (1024, 1024, 512)
    return _spec(shape, source, cut, destination, cut_to)


def one_to_many(hosts: int, devices: int) -> tuple[TensorSpec, Topology]:
    """1 GiB from one rank to all devices of some hosts."""
    return _spec((2**28,), (1, 1), ("",), (hosts, devices), ("",))


def _spec(
    shape: tuple[int, ...],
    source: tuple[int, int],
    cut: tuple[str, ...],
    destination: tuple[int, int],
    cut_to: tuple[str, ...],
) -> tuple[TensorSpec, Topology]:
    first = prod(source)
    spec = TensorSpec(
        name="x",
        shape=shape,
        itemsize=4,
        source=_layout(shape, source, cut, 0),
        destination=_layout(shape, destination, cut_to, first),
    )
    hosts = [tuple(range(h * source[1], (h + 1) * source[1])) for h in range(source[0])]
    each = destination[1]
    hosts += [tuple(range(first + h * each, first + (h + 1) * each)) for h in range(destination[0])]
    return spec, Topology(
        hosts=tuple(hosts), inter_host_bytes_per_s=TEN_GBIT, intra_host_bytes_per_s=1e15
    )


def _layout(
    shape: tuple[int, ...], mesh: tuple[int, int], cut: tuple[str, ...], first: int
) -> Layout:
    placements = ["R", "R"]
    for d, axes in enumerate(cut):
        for axis in map(int, axes):
            placements[axis] = f"S({d})"
    return Layout(
        shape=shape,
        ranks=tuple(range(first, first + prod(mesh))),
        mesh_shape=mesh,
        placements=tuple(placements),
    )


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> Layout:
    """Any mesh of up to `world` ranks in any order, any placements."""
    mesh = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda m: prod(m) <= world)
    )
    ranks = draw(st.permutations(range(world)))[: prod(mesh)]
    kinds = ["R", *(f"{k}S({d})" for d in range(len(shape)) for k in ("", "_"))]
    placements = [draw(st.sampled_from(kinds)) for _ in mesh]
    return Layout(
        shape=shape,
        ranks=tuple(ranks),
        mesh_shape=tuple(mesh),
        placements=tuple(placements),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[TensorSpec], Topology]:
    """One to three tensors, uneven and empty ones among them, on one to four hosts."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    world = sum(sizes)
    specs = []
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        spec = TensorSpec(
            name=f"t{i}",
            shape=shape,
            itemsize=draw(st.sampled_from([1, 2, 8])),
            source=draw(layouts(shape, world)),
            destination=draw(layouts(shape, world)),
        )
        specs += [spec] * draw(st.integers(1, 2))
    starts = [sum(sizes[:h]) for h in range(len(sizes))]
    topology = Topology(
        hosts=tuple(tuple(range(a, a + n)) for a, n in zip(starts, sizes, strict=True)),
        inter_host_bytes_per_s=1e9,
        intra_host_bytes_per_s=draw(st.sampled_from([1e9, 1e10])),
        nics_per_host=draw(st.integers(1, 3)),
        latency_ns=draw(st.integers(0, 50)),
    )
    return specs, topology


def walk(plan: TransferPlan) -> None:
    """Do the copies and transfers with numpy arrays; every rank must end with exactly its slice."""
    whole = [
        np.arange(prod(s.shape)).reshape(s.shape) + np.array(1000 * i)
        for i, s in enumerate(plan.specs)
    ]
    source = [_pieces(spec.source, whole[i]) for i, spec in enumerate(plan.specs)]
    result = [
        _pieces(spec.destination, np.full_like(whole[i], -1)) for i, spec in enumerate(plan.specs)
    ]
    for copy in plan.copies:
        task = plan.tasks[copy.task]
        for t in task.tensors:
            there = _inside(plan.specs[t].source.box(copy.rank), task.box)
            here = _inside(plan.specs[t].destination.box(copy.rank), task.box)
            assert (result[t][copy.rank][here] == -1).all()
            result[t][copy.rank][here] = source[t][copy.rank][there]
    for transfer in plan.transfers:
        assert transfer.sender != transfer.receiver
        assert transfer.parts
        for part in transfer.parts:
            task = plan.tasks[part.task]
            assert 0 <= part.start < part.stop <= task.elements
            for t, start, stop in part.in_tensors(task):
                for box in sub_boxes(task.box, start, stop):
                    spec = plan.specs[t]
                    if transfer.sender in task.senders:
                        own = source[t][transfer.sender]
                        values = own[_inside(spec.source.box(transfer.sender), box)]
                    else:
                        own = result[t][transfer.sender]
                        values = own[_inside(spec.destination.box(transfer.sender), box)]
                        assert (values >= 0).all()
                    at = _inside(spec.destination.box(transfer.receiver), box)
                    assert (result[t][transfer.receiver][at] == -1).all()
                    result[t][transfer.receiver][at] = values
    for t, spec in enumerate(plan.specs):
        for rank, wanted in _pieces(spec.destination, whole[t]).items():
            np.testing.assert_array_equal(result[t][rank], wanted)


def _pieces(layout: Layout, whole: np.ndarray) -> dict[int, np.ndarray]:
    boxes = layout.boxes()
    return {r: np.array(whole[tuple(slice(*c) for c in box)]) for r, box in boxes.items()}


def _inside(outer: tuple[tuple[int, int], ...] | None, box: tuple[tuple[int, int], ...]):
    assert outer is not None
    for (a, b), (c, d) in zip(outer, box, strict=True):
        assert a <= c <= d <= b
    return tuple(slice(c - a, d - a) for (a, _), (c, d) in zip(outer, box, strict=True))
