"""Proves that a rank which says nothing is noticed and named at any moment of its life, and that
one which is merely busy is not.

Ranks misbehave at named points: the programs here wrap the functions that a rank goes through.
"""

import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from processes import run_ranks, start_ranks

pytestmark = pytest.mark.alone
DEAD_AFTER_S = 1.0
START_S = 3.0
END_S = 5.0


def live(point: str, act: str) -> None:
    """A child: a whole life under the watchdog; rank 1 acts at `point`."""
    import torch.distributed as dist

    from interlace.config import WatchdogConfig
    from interlace.ranks import process_group as joined
    from interlace.ranks.heartbeat import Ring

    acts: dict[str, Callable[[], None]] = {
        # To this thread: a signal to the process may be taken by another thread, and this one,
        # the watchdog's, would go on for a moment.
        "pause": lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),
        "exit": lambda: os._exit(0),
    }

    def before(here: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any, **options: Any) -> Any:
            if here == point and os.environ["RANK"] == "1":
                print("acting", flush=True)
                acts[act]()
            return call(*args, **options)

        return acting

    joined.meet = before("before the store", joined.meet)
    Ring.join = before("on entering", Ring.join)
    dist.init_process_group = before("building", dist.init_process_group)
    dist.destroy_process_group = before("tearing down", dist.destroy_process_group)
    limits = WatchdogConfig(
        heartbeat_s=0.2, dead_after_s=DEAD_AFTER_S, start_s=START_S, end_s=END_S
    )
    with joined.process_group(limits=limits, process_ends=True):
        dist.barrier()
    before("after the end", print)("done", flush=True)


def nothing() -> None:
    """A child."""


@pytest.fixture(scope="module", autouse=True)
def quick_start() -> None:
    """From here on ranks start within START_S of each other: what they are forked from runs."""
    run_ranks("test_supervision:nothing", 2)


@pytest.mark.parametrize(
    ("point", "act", "within_s", "said"),
    [
        ("before the store", "pause", START_S, "rank 1 has not joined the run within 3 s"),
        ("before the store", "exit", START_S, "rank 1 has not joined the run within 3 s"),
        ("on entering", "pause", START_S, "rank 1 has not joined the run within 3 s"),
        ("building", "pause", DEAD_AFTER_S, r"is silent for 1\.\d s: it is paused"),
        ("building", "exit", DEAD_AFTER_S, "died"),
        ("tearing down", "pause", DEAD_AFTER_S, r"is silent for 1\.\d s: it is paused"),
        ("after the end", "pause", DEAD_AFTER_S, r"had finished, but is paused for 1\."),
    ],
)
def test_a_rank_is_named_wherever_it_falls_silent(
    point: str, act: str, within_s: float, said: str
) -> None:
    """No launcher helps: as under torchrun, ranks have only each other."""
    with start_ranks("test_supervision:live", 2, args=[point, act]) as ranks:
        ranks.wait_for(1, "acting")
        since = time.monotonic()
        (other,) = ranks.wait([0])
        name = "rank 1" if "joined" in said else f"pid {ranks.pid(1)})"
    assert other.returncode in {1, 43}, other.stderr
    assert re.search(said, other.stderr), other.stderr
    assert name in other.stderr
    assert other.ended_at - since < within_s + 4.0


def hang_in_teardown() -> None:
    """A child: rank 1 beats on, but never comes back from taking down its group."""
    import torch.distributed as dist

    from interlace.config import WatchdogConfig
    from interlace.ranks import process_group as joined

    destroy = dist.destroy_process_group
    hangs = os.environ["RANK"] == "1"
    dist.destroy_process_group = lambda: time.sleep(60) if hangs else destroy()
    limits = WatchdogConfig(heartbeat_s=0.2, dead_after_s=DEAD_AFTER_S, end_s=1.0)
    with joined.process_group(limits=limits, process_ends=True):
        dist.barrier()


def test_a_rank_that_hangs_in_its_end_has_a_bound() -> None:
    results = run_ranks("test_supervision:hang_in_teardown", 2, check=False)
    assert results[1].returncode == 43
    said = "takes longer than 1 s for taking down its process group"
    assert all(f"{said}" in result.stderr for result in results)
    assert all("rank 1 (" in result.stderr for result in results)


def work_with_the_lock_held() -> None:
    """A child: rank 1 holds the interpreter lock, and works, for three times `dead_after_s`."""
    from processes import gloo_group

    from interlace.ranks.watchdog import Watchdog

    rank = int(os.environ["RANK"])
    with (
        gloo_group() as store,
        Watchdog(store, rank, 2, heartbeat_s=0.2, dead_after_s=DEAD_AFTER_S),
    ):
        if rank == 1:
            numbers, took_s = 10**6, 0.0
            while took_s < 3 * DEAD_AFTER_S:  # one native call, so nothing else of Python runs
                began = time.monotonic()
                sum(range(numbers))
                took_s = time.monotonic() - began
                numbers = int(numbers * min(4.0, 3.3 * DEAD_AFTER_S / max(took_s, 0.01)))


def test_a_rank_that_is_silent_but_works_is_left_alone() -> None:
    results = run_ranks("test_supervision:work_with_the_lock_held", 2)
    assert [(result.returncode, result.stderr) for result in results] == [(0, "")] * 2


def run_out_of_descriptors() -> None:
    """A child: no file can be opened any more; rank 1 says when that was so for long."""
    from processes import gloo_group

    from interlace.ranks.watchdog import Watchdog

    rank = int(os.environ["RANK"])
    with (
        gloo_group() as store,
        Watchdog(store, rank, 2, heartbeat_s=0.2, dead_after_s=DEAD_AFTER_S),
    ):
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        time.sleep(2 * DEAD_AFTER_S)
        os.write(1, b"still well\n")
        time.sleep(60)


def test_a_rank_without_file_descriptors_accuses_nobody_falsely() -> None:
    """Both ranks have none left, and stay; when rank 1 is killed then, it is named."""
    with start_ranks("test_supervision:run_out_of_descriptors", 2) as ranks:
        for rank in (0, 1):
            ranks.wait_for(rank, "still well")
        ranks.signal(1, signal.SIGKILL)
        (other,) = ranks.wait([0])
        assert f"pid {ranks.pid(1)}) died" in other.stderr
    assert other.returncode == 43
