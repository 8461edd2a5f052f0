"""A step of a pipeline that fails on one rank ends on all of them, and all say why."""

import os
import re
import signal
import time

import pytest
from processes import gloo_group, start_ranks
from test_pipeline_step import QUICK, built, language, loss_of
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.errors import RunError
from interlace.ir.actions import Action
from interlace.runtime.executor import StepRun

RANKS, COUNT = 3, 4
LONG_S = 3600
"""Seconds of the process group's own timeout: it is not what ends these tests."""
MIDDLE = {0: "forward_0 3", 1: "backward_1 2"}
"""By rank that fails: the action in which it does."""
BOUND_S = 20
"""Seconds of a rank's wait, where a killed one may have sent a part of a message: gloo does not
tell a receive of which a part has come that the connection is closed."""
LATE_S = 5
"""Seconds in which the rank that fails has ended its connections, before another one begins to
receive from it."""


def failing(how: str, victim: int, wait_s: float) -> None:
    """A child: something happens to one rank in the middle of the second step."""
    with gloo_group(LONG_S, named="unnamed" not in how):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
        step = interlace.compile_step(
            built(), loss_of, language(1)[0], mesh=mesh, schedule="one_f_one_b", config=QUICK,
            wait_s=wait_s,
        )  # fmt: skip
        step(language(COUNT))
        rank, run = mesh.get_rank(), StepRun.action

        def action(self: StepRun, each: Action) -> None:
            if rank == victim and str(each) == MIDDLE[victim]:
                if how.startswith("raises"):
                    raise ValueError("the user's own")
                os.kill(os.getpid(), getattr(signal, how))
            if "early" in how and rank == 0 and str(each) == "backward_0 1":
                time.sleep(LATE_S)
            run(self, each)

        StepRun.action = action  # type: ignore[method-assign]
        try:
            step(language(COUNT))
            print("no error", flush=True)
        except (RunError, ValueError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        print("said", flush=True)
        time.sleep(LONG_S)  # its process lives on


def ended(how: str, victim: int, wait_s: float) -> list[str]:
    """What the ranks say, by rank; of the victim what it said itself. Each has said it before the
    process group's timeout."""
    args = [how, victim, wait_s]
    with start_ranks("test_pipeline_ends:failing", RANKS, args=args, timeout_s=100) as ranks:
        speak = [r for r in range(RANKS) if r != victim or how.startswith("raises")]
        for rank in speak:
            ranks.wait_for(rank, "said")
        return [ranks.output(rank) for rank in range(RANKS)]


@pytest.mark.parametrize("how", ["raises", "raises early", "raises, unnamed"])
def test_a_rank_that_raises_ends_the_step_on_all(how: str) -> None:
    """At once, long before the bound: each names the message, the action that makes one that
    it waited for, and what the first rank said. That one has its own exception. Also on gloo that
    nobody has named as the group's backend."""
    first, own, last = ended(how, 1, LONG_S)
    assert own.startswith("ValueError: the user's own")
    for text in (first, last):
        # A rank that comes late may hear of it from a third one, which has left as well.
        assert re.search(r"rank \d did not end", text)
        assert "receive" not in text or re.search(r"rank \d makes it in its action ", text)
        assert "rank 1 said first: ValueError: the user's own" in text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_paused_rank_ends_the_step_on_all(victim: int) -> None:
    """By the bound, whose name is in the hint; also if the paused process hosts the store."""
    texts = ended("SIGSTOP", victim, 10)
    waiting = [text for rank, text in enumerate(texts) if rank != victim]
    assert all("Unended" in text and "did not end" in text for text in waiting), waiting
    # A message that had not left when the process stopped is one of an action before.
    makes = re.compile(rf"rank {victim} makes it in its action \d+, \w+_{victim} \d")
    assert any(makes.search(text) for text in waiting), waiting
    assert any("compile_step(wait_s=10) bounds" in text for text in waiting), waiting


def test_a_killed_rank_ends_the_step_on_all() -> None:
    """At once, as its connections close, or by the bound."""
    first, _, last = ended("SIGKILL", 1, BOUND_S)
    for text in (first, last):
        assert "did not end" in text
    assert "rank 1 did not end" in first
