"""Proves that SIGINT and SIGTERM end all ranks at the same step, or at once when blocked."""

import os
import signal
import time

import pytest
from processes import gloo_group, start_ranks

from interlace.ranks.signals import StopFlag, agreed

pytestmark = pytest.mark.alone


def train(steps: int) -> list[object]:
    """A child: steps of different length on every rank; ends early when asked to."""
    with gloo_group(), StopFlag() as flag:
        for step in range(steps):
            if step == 2:
                print("under way", flush=True)
            time.sleep(0.01 * (1 + int(os.environ["RANK"])))
            if agreed(flag):
                return [step, flag.requested]
    return [steps, flag.requested]


def block_in_gloo(force_after_s: float) -> None:
    """A child: rank 0 waits in C++ for a message that rank 1 never sends."""
    import torch
    import torch.distributed as dist

    with gloo_group(600), StopFlag(force_after_s=force_after_s):
        print("under way", flush=True)
        if os.environ["RANK"] == "0":
            dist.recv(torch.empty(1), 1)
        time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_ranks_stop_at_the_same_step(number: int) -> None:
    """Only rank 1 gets the signal."""
    with start_ranks("test_signals:train", 3, args=[10**9]) as ranks:
        ranks.wait_for(1, "under way")
        ranks.signal(1, number)
        results = ranks.wait()
    assert [(r.returncode, r.stderr) for r in results] == [(0, "")] * 3
    steps, names = zip(*(r.value for r in results), strict=True)
    assert len(set(steps)) == 1
    assert set(names) == {signal.Signals(number).name}


def test_a_second_sigint_ends_a_rank_that_is_blocked_in_gloo() -> None:
    with start_ranks("test_signals:block_in_gloo", 2, args=[600]) as ranks:
        ranks.wait_for(0, "under way")
        ranks.signal(0, signal.SIGINT)
        time.sleep(1.0)  # more than the 0.5 s in which two signals count as one
        assert ranks.running() == [0, 1]
        sent_at = ranks.signal(0, signal.SIGINT)
        result = ranks.wait([0])[0]
    assert result.returncode == 128 + signal.SIGINT
    assert result.stderr == "error: stopped by SIGINT: it was sent twice\n"
    assert result.ended_at - sent_at < 5


def test_sigterm_ends_a_rank_that_is_blocked_in_gloo_after_a_while() -> None:
    with start_ranks("test_signals:block_in_gloo", 2, args=[1.0]) as ranks:
        ranks.wait_for(0, "under way")
        ranks.signal(0, signal.SIGTERM)
        sent_at = ranks.signal(0, signal.SIGTERM)  # at once: the same request
        result = ranks.wait([0])[0]
    assert result.returncode == 128 + signal.SIGTERM
    assert "error: stopped by SIGTERM: no step has ended in the 1 s since" in result.stderr
    assert 0.9 < result.ended_at - sent_at < 6


def test_without_a_group_the_local_flag_counts_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag(force_after_s=30) as flag:
        assert not agreed(flag)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not flag.requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert agreed(flag)
        assert flag.requested == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
