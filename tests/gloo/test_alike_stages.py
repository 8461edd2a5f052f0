"""Values that all ranks of a stage hold alike cross to the next stage once, and others part by
part, as graphs show.

Wide are ranks that take parts of their own, which cross as shared sequences do.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from test_stage_layouts import (
    MICRO_BATCHES,
    QUICK,
    Skipping,
    built,
    laid_out,
    loss_of,
    meshes_of,
    own_mesh,
    rows_of,
)
from torch import Tensor

import interlace
from interlace.reshard.agreement import ASSUMED
from interlace.reshard.planning.layout import Layout
from interlace.reshard.planning.make_plan import make_plan
from interlace.reshard.planning.transfer_plan import TensorSpec
from interlace.reshard.program import make_program, receives_first
from interlace.runtime.laid_out_link import LaidOutLink
from wide import WIDE


class OwnPart(Skipping):
    """Between blocks each rank works on its own positions; nothing is exchanged for that."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).chunk(2, dim=1)[dist.get_rank() % 2]
        for block in self.blocks:
            x = x + block.down(torch.relu(block.up(block.norm(x))))
        return self.head(torch.cat((x, x), dim=1))


def crossing(sequence: bool, own_parts: bool) -> dict[str, Any]:
    """By direction: the axes over which what crosses is alike, the bytes that are to cross, and
    those that this rank sends."""
    with gloo_group(60):
        meshes = meshes_of([{"tp": 2}, {"tp": 2}])
        mesh = own_mesh(meshes)
        torch.manual_seed(7)
        module = OwnPart(3).double() if own_parts else laid_out(built(3), mesh, sequence)
        batches = rows_of(mesh)
        step = interlace.compile_step(
            module, loss_of, batches[0], stages=meshes, schedule="one_f_one_b",
            split_at=["blocks.2"], config=QUICK,
        )  # fmt: skip
        step(batches)
        assert len(batches) == MICRO_BATCHES
        assert isinstance(step.link, LaidOutLink)
        return {
            f"{route[0]}": {
                "alike": [layout.copied for layout in boundary.layouts],
                "whole": sum(
                    8 * torch.Size(layout.source.shape).numel() for layout in boundary.layouts
                ),
                "sent": sum(
                    each.message.size_bytes for each in boundary.program.operations if each.sends
                ),
            }
            for route, boundary in step.link._boundaries.items()
        }


@pytest.mark.parametrize(
    ("sequence", "own_parts", "alike"),
    [(False, False, True), (True, False, False), pytest.param(False, True, False, marks=WIDE)],
)
def test_what_is_alike_crosses_once(sequence: bool, own_parts: bool, alike: bool) -> None:
    """Under Megatron's layout a residual is alike on all ranks; with sequence parallelism, or where
    each rank takes a part of its own, it is not."""
    results = run_ranks("test_alike_stages:crossing", 4, args=[sequence, own_parts], timeout_s=120)
    for way, senders in (("forward", (0, 1)), ("backward", (2, 3))):
        found = [results[rank].value[way] for rank in senders]
        assert any("tp" in axes for each in found for axes in each["alike"]) is alike
        # All ranks are on one host here, where each receiver is served by itself.
        copies = 2 if alike else 1
        assert sum(each["sent"] for each in found) == copies * found[0]["whole"]


@pytest.mark.parametrize("strategy", ["send_recv", "local_all_gather", "broadcast"])
def test_receives_come_first_and_keep_their_order(strategy: str) -> None:
    """What a forward needs stands before it as ever, and messages between two ranks stay in
    order."""
    layout = Layout(shape=(64,), ranks=(0,), mesh_shape=(1,), placements=("R",))
    everywhere = Layout(shape=(64,), ranks=(1, 2, 3), mesh_shape=(3,), placements=("R",))
    spec = TensorSpec(name="x", shape=(64,), itemsize=8, source=layout, destination=everywhere)
    topology = replace(ASSUMED, hosts=((0,), (1, 2, 3)))
    plan = make_plan([spec], topology, strategy=strategy, chunk_bytes=128)
    for rank in range(4):
        program = make_program(plan, rank, most_bytes=1 << 20)
        moved = receives_first(program)
        assert sorted(map(id, (each.message for each in moved.operations))) == sorted(
            map(id, (each.message for each in program.operations))
        )
        kinds = [each.sends for each in moved.operations]
        assert kinds == sorted(kinds)
        for sends in (False, True):
            orders = [
                [(each.peer, each.message) for each in of.operations if each.sends is sends]
                for of in (program, moved)
            ]
            assert orders[0] == orders[1]
        for before, after in (
            (each, other)
            for each in program.operations
            for other in moved.operations
            if each.message is other.message
        ):
            assert [program.operations[index].message for index in before.after] == [
                moved.operations[index].message for index in after.after
            ]
