"""A step of stages that are laid out differently ends on all ranks if one rank cannot go on."""

import os
import re
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
BOUND_S = 20
"""Seconds of a rank's wait, where a killed one may have sent a part of a message: gloo does not
tell a receive of which a part has come that the connection is closed."""
MIDDLE = {1: "forward_0 3", 3: "backward_1 2"}
"""By rank that fails, the second one of its stage: the action in which it does."""


def failing(how: str, victim: int, wait_s: float) -> None:
    """A child: something happens to one rank of a stage of two in the middle of a step."""
    with gloo_group(LONG_S):
        meshes = meshes_of([{"tp": 2}, {"dp_replicate": 2}])
        mesh = own_mesh(meshes)
        batches = rows_of(mesh)
        step = interlace.compile_step(
            laid_out(built(), mesh, False), loss_of, batches[0], stages=meshes,
            schedule="one_f_one_b", config=QUICK, wait_s=wait_s,
        )  # fmt: skip
        step(batches)
        rank, run = int(os.environ["RANK"]), StepRun.action

        def action(self: StepRun, each: Action) -> None:
            if rank == victim and str(each) == MIDDLE[victim]:
                if how == "raises":
                    raise ValueError("the user's own")
                os.kill(os.getpid(), getattr(signal, how))
            run(self, each)

        StepRun.action = action  # type: ignore[method-assign]
        try:
            step(batches)
            print("no error", flush=True)
        except (RunError, ValueError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        print("said", flush=True)
        time.sleep(LONG_S)  # its process lives on


def ended(how: str, victim: int, wait_s: float) -> dict[int, str]:
    """What the ranks say that can; each before the process group's timeout."""
    args = [how, victim, wait_s]
    with start_ranks("test_stage_layouts_ends:failing", 4, args=args, timeout_s=100) as ranks:
        speak = [rank for rank in range(4) if rank != victim or how == "raises"]
        for rank in speak:
            ranks.wait_for(rank, "said")
        return {rank: ranks.output(rank) for rank in speak}


@pytest.mark.parametrize("how", ["raises", "SIGKILL"])
def test_a_rank_that_fails_ends_the_step_on_all(how: str) -> None:
    """At once, or by the bound if it was killed: ranks of the other stage name the message, that of
    its own what they wait for, and all what it said if it could."""
    texts = ended(how, 3, LONG_S if how == "raises" else BOUND_S)
    for rank in (0, 1, 2):
        assert "no error" not in texts[rank]
        assert "did not end" in texts[rank], texts
        if how == "raises":
            assert "rank 3 said first: ValueError: the user's own" in texts[rank], texts
    if how == "raises":
        assert texts[3].startswith("ValueError: the user's own")
    assert any("backward_1>0" in texts[rank] for rank in (0, 1)), texts


def test_a_paused_rank_ends_the_step_on_all() -> None:
    """By the bound, which holds for the collectives inside of its stage too: the other rank of the
    stage says in which action it waits and for whom, the other stage which action makes what it
    waits for."""
    texts = ended("SIGSTOP", 1, 10)
    assert all("Unended" in text and "did not end" in text for text in texts.values()), texts
    inside = (
        "a collective of rank 0 did not end, in its action 4, forward_0 3, where it meets rank 1"
    )
    assert inside in texts[0], texts
    makes = re.compile(
        r"from stage 0 \(ranks 0, 1\).*stage 0 \(ranks 0, 1\) makes it in its action 4"
    )
    assert any(makes.search(texts[rank]) for rank in (2, 3)), texts
