"""Proves the heartbeat protocol without processes: what is read, who is accused and when."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from interlace.ranks import heartbeat
from interlace.ranks.heartbeat import Ring, Verdict
from interlace.ranks.identity import ProcessIdentity, ProcessView
from interlace.ranks.silence import Limits

pytestmark = pytest.mark.alone
HERE = ProcessIdentity.of_this_process(0)
LIMITS = Limits(heartbeat_s=0.5, dead_after_s=3.0)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class CountingStore:
    """Counts the requests that reach the store it wraps."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.requests: list[str] = []

    def __getattr__(self, name: str):
        self.requests.append(name)
        return getattr(self._store, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=None))
    return clock


def rings(store, world_size: int) -> list[Ring]:
    """Ranks of other hosts, as far as this process can tell."""
    made = []
    for rank in range(world_size):
        who = dataclasses.replace(HERE, rank=rank, host=f"host{rank}", pid=7 + rank, kernel="other")
        made.append(Ring(store, who, world_size, LIMITS))
        made[-1].join()
    return made


def rounds(ring: Ring, clock: Clock, count: int, gap_s: float = 0.5) -> Verdict | None:
    for _ in range(count):
        clock.now += gap_s
        if (verdict := ring.round()) is not None:
            return verdict
    return None


def test_a_silent_rank_is_named_by_its_neighbour_and_read_by_all(clock: Clock) -> None:
    ring0, ring1, ring2 = rings(dist.HashStore(), 3)
    ring1.round()
    assert rounds(ring0, clock, 6) is None  # the first look heard its only beat
    verdict = rounds(ring0, clock, 1)
    assert verdict is not None
    assert verdict.rank == 1
    assert verdict.message == "rank 1 (host1, pid 8) is silent for 3.0 s"
    assert ring2.round() == verdict
    assert ring1.round() == verdict
    assert verdict.error().ranks == (1,)


def test_time_in_which_a_rank_was_paused_itself_is_not_counted(clock: Clock) -> None:
    """The whole machine sleeps for a minute: the neighbour gets its full time to beat again."""
    ring0, ring1, _ = rings(dist.HashStore(), 3)
    ring1.round()
    assert rounds(ring0, clock, 2) is None
    assert rounds(ring0, clock, 1, gap_s=60.0) is None
    assert rounds(ring0, clock, 2) is None
    ring1.round()
    assert rounds(ring0, clock, 6) is None


def test_the_first_verdict_holds(clock: Clock) -> None:
    ring0, ring1, ring2 = rings(dist.HashStore(), 3)
    first = Verdict(1, "rank 1 failed: ValueError", "see rank 1")
    assert ring1.decide(first) == first
    assert ring2.decide(Verdict(2, "rank 2 failed: Connection closed by peer", "")) == first
    assert ring0.round() == first


def test_a_rank_that_stopped_is_passed_over_and_the_next_one_watched(clock: Clock) -> None:
    ring0, ring1, ring2 = rings(dist.HashStore(), 3)
    ring1.round()
    ring2.round()
    assert ring1.stop()
    assert not ring0.stop()  # its process may host the store: rank 2 still runs
    verdict = rounds(ring0, clock, 20)
    assert verdict is not None
    assert verdict.message.startswith("rank 2 (host2, pid 9) is silent")
    assert ring2.stop()
    assert ring0.stop()


def test_a_round_is_two_requests_at_any_world_size(clock: Clock) -> None:
    store = CountingStore(dist.HashStore())
    made = rings(store, 64)
    for ring in made:
        ring.round()
    store.requests.clear()
    for ring in made:
        assert ring.round() is None
    assert sorted(store.requests) == ["multi_get"] * 64 + ["set"] * 64


def test_only_the_very_process_is_ever_taken_for_it() -> None:
    """A re-used pid has another start time, a container another kernel identity."""
    sight = ProcessView.of(HERE).look()
    assert sight is not None
    assert not sight.ended
    reused = ProcessView.of(dataclasses.replace(HERE, started="1"))
    assert reused.ended()
    assert not reused.kill()
    elsewhere = ProcessView.of(dataclasses.replace(HERE, kernel="another boot"))
    assert elsewhere.look() is None
    assert not elsewhere.kill()
    assert ProcessIdentity.from_json(HERE.to_json()) == HERE
