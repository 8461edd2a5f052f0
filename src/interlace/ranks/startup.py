"""The first moments of a rank: it finds the store of its job, and says that it came."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from interlace.ranks.ending import bounded
from interlace.ranks.launched import launcher_hosts_store

_SLACK_S = 10.0  # for the meeting's own time limits, which tell more
_WORDS = "interlace/launcher"


@contextmanager
def meeting_bound(within_s: float) -> Iterator[None]:
    """Ends this process with 44 where meeting the other ranks hangs for longer."""
    host = "the launcher" if launcher_hosts_store(os.environ) else "rank 0"
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    message = (
        f"rank {os.environ['RANK']} did not reach the store at {address} within {within_s:g} s: "
        f"{host}, which hosts it, has not started, has ended or is paused, or cannot be reached"
    )
    with bounded(within_s + _SLACK_S, message):
        yield


def join(store: dist.Store, rank: int) -> None:
    """Lets the launcher know, if it hosts the store, that this rank has come."""
    _say(store, "joined", rank)


def leave(store: dist.Store, rank: int, within_s: float) -> None:
    """Lets the launcher know, if it hosts the store, that this rank's process is about to end."""
    if not launcher_hosts_store(os.environ):
        return  # the store ends with rank 0
    what = f"rank {rank} had finished, but its launcher did not answer within {within_s:g} s"
    with bounded(within_s, what):
        try:
            _say(store, "left", rank)
        except dist.DistError:
            return  # the launcher is gone, and nobody waits for this word


def said(store: dist.Store, word: str, rank: int) -> bool:
    """Whether a rank has `joined` or `left`; for the launcher, which hosts the store."""
    return store.check([f"{_WORDS}/{word}/{rank}"])


def _say(store: dist.Store, word: str, rank: int) -> None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    store.set(f"{_WORDS}/{word}/{rank}", "1")
