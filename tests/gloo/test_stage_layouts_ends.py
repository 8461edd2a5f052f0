"""A step of stages that are laid out differently ends on all ranks if one rank cannot go on."""

import os
import signal
import time

import pytest
from processes import gloo_group, start_ranks
from test_stage_layouts import QUICK, built, laid_out, loss_of, meshes_of, own_mesh, rows_of

import interlace
from interlace.errors import RunError
from interlace.ir.actions import Action
from interlace.runtime.executor import StepRun

LONG_S = 3600
"""Seconds of the process group's own timeout: it is not what ends these tests."""
VICTIM, MIDDLE = 3, "backward_1 2"
"""The second rank of the second stage, and the action in which it fails."""


def failing(how: str) -> None:
    """A child: something happens to one rank of a stage of two in the middle of a step."""
    with gloo_group(LONG_S):
        meshes = meshes_of([{"tp": 2}, {"dp_replicate": 2}])
        mesh = own_mesh(meshes)
        batches = rows_of(mesh)
        step = interlace.compile_step(
            laid_out(built(), mesh, False), loss_of, batches[0], stages=meshes,
            schedule="one_f_one_b", config=QUICK, wait_s=LONG_S,
        )  # fmt: skip
        step(batches)
        rank, run = int(os.environ["RANK"]), StepRun.action

        def action(self: StepRun, each: Action) -> None:
            if rank == VICTIM and str(each) == MIDDLE:
                if how == "raises":
                    raise ValueError("the user's own")
                os.kill(os.getpid(), signal.SIGKILL)
            run(self, each)

        StepRun.action = action  # type: ignore[method-assign]
        try:
            step(batches)
            print("no error", flush=True)
        except (RunError, ValueError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        print("said", flush=True)
        time.sleep(LONG_S)  # its process lives on


@pytest.mark.parametrize("how", ["raises", "SIGKILL"])
def test_a_rank_that_fails_ends_the_step_on_all(how: str) -> None:
    """At once: ranks of the other stage name the message, that of its own what they wait for, and
    all what it said if it could."""
    with start_ranks("test_stage_layouts_ends:failing", 4, args=[how], timeout_s=100) as ranks:
        speak = [rank for rank in range(4) if rank != VICTIM or how == "raises"]
        for rank in speak:
            ranks.wait_for(rank, "said")
        texts = {rank: ranks.output(rank) for rank in speak}
    for rank in (0, 1, 2):
        assert "no error" not in texts[rank]
        assert "did not end" in texts[rank], texts
        if how == "raises":
            assert "rank 3 said first: ValueError: the user's own" in texts[rank], texts
    if how == "raises":
        assert texts[VICTIM].startswith("ValueError: the user's own")
    assert any("backward_1>0" in texts[rank] for rank in (0, 1)), texts
