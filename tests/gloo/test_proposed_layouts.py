"""What the search of layouts proposes is what the runtime takes: it is traced in a fake world.

Tiny models of every kind, on 1 to 16 devices: a layout of the space of each, drawn at random, is
checked as `interlace train` does and traced as a rank would be, with its schedule proved for its
stages. 25 batches of 8; the first runs in `make test`, the others are wide.
"""

import random
from dataclasses import replace

import pytest
from test_layout_search import random_space

from interlace.config import RunConfig
from interlace.degrees import resolve_layout
from interlace.rules import check
from interlace.schedules.finder import find
from interlace.strategy.chunk_cuts import split_names
from interlace.strategy.job_layout import JobLayout, layout_of, with_layout
from interlace.strategy.layout_space import LayoutSpace
from interlace.strategy.simulated_job import simulate_job
from interlace.train.fake_trace import trace_fake

COUNT = 8
BATCHES = [0, *(pytest.param(each, marks=pytest.mark.wide) for each in range(1, 25))]
LONGEST = 64
"""Tokens of a sequence: shorter than those with which spaces share sequences, for which a layout
is drawn and then shortened."""


def drawn(draw: random.Random, *, experts: bool) -> tuple[LayoutSpace, JobLayout]:
    """A space, and a layout of it; with `experts` one that deals them to ranks."""
    while True:
        space = random_space(draw)
        layouts = [each for each in space.layouts() if each.expert > 1 or not experts]
        if layouts:
            return space, draw.choice(layouts)


def proposed(space: LayoutSpace, layout: JobLayout) -> RunConfig:
    """The run file that a search would write for this layout, with sequences short enough to
    trace."""
    cuts = simulate_job(space.config, space.cluster, layout).cuts
    staged = layout.pipeline > 1
    run = with_layout(space.config, layout, split_names(cuts) * staged)
    pieces = layout.tensor * layout.context * 2
    length = min(run.data.sequence_length, -(-LONGEST // pieces) * pieces)
    return replace(run, data=replace(run.data, sequence_length=length))


@pytest.mark.parametrize("batch", BATCHES)
def test_the_runtime_takes_what_is_proposed(batch: int) -> None:
    draw = random.Random(batch)
    for number in range(COUNT):
        space, layout = drawn(draw, experts=number % 4 == 0)
        run = proposed(space, layout)
        check(run)
        assert resolve_layout(run, space.devices).parallel.ranks == space.devices
        assert layout_of(run) == layout
        if layout.pipeline > 1:
            find(layout.schedule).of_ranks(layout.pipeline, layout.micro_batches)
        graphs = trace_fake(run).whole.op_graphs
        assert {"forward", "backward"} <= set(graphs), layout
        axes = {op.lane for graph in graphs.values() for op in graph.operators if op.is_collective}
        sizes = {"tp": layout.tensor, "cp": layout.context, "ep": layout.expert}
        # Axes of all ranks have one process group, torch's default one, and so one lane.
        whole = {axis for axis, size in sizes.items() if size == space.devices > 1}
        assert not whole or axes & whole, (axes, layout)
        for axis in sizes.keys() - whole:
            assert (axis in axes) == (sizes[axis] > 1), (axes, layout)
