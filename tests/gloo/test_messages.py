"""Proves that the all-gathers and all-to-alls that gloo carries as messages are those of torch."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks, start_ranks
from torch import Tensor

from interlace.graphs import collectives
from interlace.graphs.gloo_messages import Messages

pytestmark = pytest.mark.alone

RANKS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int8)
SPLITS = [[2, 0, 3], [0, 0, 0], [1, 4, 2]]
"""Rows that rank i sends to rank j."""


def draw(rank: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Not contiguous."""
    numbers = torch.arange(rows * 4).view(4, rows).t() + 7 * rank
    return numbers.to(dtype) if dtype != torch.bool else numbers % 3 == 0


def calls(rank: int, name: str, dtype: torch.dtype) -> dict[str, tuple[Any, Tensor]]:
    """Each call, and what torch's own gives."""
    x = draw(rank, 5, dtype)
    gathered = torch.empty(5 * RANKS, 4, dtype=dtype)
    dist.all_gather(list(gathered.split(5)), x.contiguous())
    sent, received = SPLITS[rank], [SPLITS[other][rank] for other in range(RANKS)]
    y = draw(rank, sum(sent), dtype)
    exchanged = torch.empty(sum(received), 4, dtype=dtype)
    dist.all_to_all_single(exchanged, y.contiguous(), received, sent)
    return {
        "gather": (lambda: collectives.all_gather(x, RANKS, name), gathered),
        "exchange": (lambda: collectives.all_to_all(y, received, sent, name), exchanged),
    }


def child() -> dict[str, list[bool]]:
    """Whether the results are right and stamped; one rank is always late."""
    with gloo_group():
        rank, found = dist.get_rank(), {}
        group = dist.group.WORLD
        assert group is not None
        for dtype in DTYPES:
            for kind, (call, expected) in calls(rank, group.group_name, dtype).items():
                time.sleep(0.02 * rank)
                plain, stamped = call(), call()
                ended = threading.Event()
                future = stamped.work.get_future()
                future.add_done_callback(lambda _, ended=ended: ended.set())
                results = [collectives.wait(plain), collectives.wait(stamped)]
                equal = [torch.equal(result, expected) for result in results]
                found[f"{kind} {dtype}"] = [
                    *equal,
                    ended.wait(10),
                    isinstance(plain.work, Messages),
                ]
        return found


def test_messages_bring_what_gloo_brings() -> None:
    """Uneven and empty parts, every kind of dtype; a future completes too."""
    for result in run_ranks("test_messages:child", RANKS):
        assert len(result.value) == 2 * len(DTYPES)
        assert not {name: facts for name, facts in result.value.items() if not all(facts)}


def bereft(asks_for_future: bool) -> str:
    """Rank 0's error when rank 1 dies with messages under way."""
    with gloo_group(timeout_s=20):
        group = dist.group.WORLD
        assert group is not None
        collectives.wait(collectives.all_gather(torch.ones(2), 2, group.group_name))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError) as caught:  # noqa: PT012  gloo may know it at once
            pending = collectives.all_gather(torch.ones(2**22), 2, group.group_name)
            if asks_for_future:
                pending.work.get_future()
            collectives.wait(pending)
        return str(caught.value)


@pytest.mark.parametrize("asks_for_future", [False, True])
def test_a_broken_message_raises(asks_for_future: bool) -> None:
    """When it is waited for, or begun."""
    with start_ranks("test_messages:bereft", 2, args=[asks_for_future]) as ranks:
        results = ranks.wait()
    assert results[1].returncode == -signal.SIGKILL
    broken = ("closed by peer", "reset by peer", "Broken pipe")
    assert any(reason in results[0].value for reason in broken)


class Counted:
    """A work that counts its waits."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("in_streams", [False, True])
def test_each_stream_waits_and_the_host_waits_once(in_streams: bool) -> None:
    """A recorder's stream waits first, and the stream that reads the rows must wait as well; a
    second wait for a message of gloo would never return."""
    work: Any = Counted()
    messages = Messages([work], torch.empty(0), in_streams=in_streams)
    messages.wait()
    messages.wait()
    assert work.waits == (2 if in_streams else 1)
