"""How the ranks of one attempt find each other, whatever earlier attempts left in the store.

torchrun starts all ranks again after a failure, and its store (or the port that rank 0 hosts one
at) may be that of the attempt before: a fast rank would read a dead rank's address. No variable of
the environment tells attempts apart: TORCHELASTIC_RESTART_COUNT differs between hosts once one of
them was cut off. So the ranks agree on a number, the epoch, before anything else:

    interlace/epoch                 counts; rank 0 draws the next one
    interlace/epoch/E/here/R        rank R has seen epoch E: a token that only this process has
    interlace/epoch/E/accepted      the tokens of all ranks, written by rank 0; the attempt begins

A rank whose token is not among them has read an older attempt's answer, and waits for a newer one.
A launcher that hosts the store is told by each rank that it has come, and that it is about to go.
"""

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from interlace.errors import InputError, RunError
from interlace.ranks.ending import bounded
from interlace.ranks.launched import launcher_hosts_store

MEET_WITHIN_S = 120.0
"""Seconds in which all ranks must come; a choice: hosts may take long to load torch from a shared
disk."""
PORT_FREE_WITHIN_S = 30.0
"""Seconds for an earlier attempt's rank 0 to end, whose store holds the port: torchrun's own
grace."""

_STORE_TIMEOUT_S = 60.0
"""Seconds for one question to the store that the ranks of an attempt share; a choice."""
_POLL_S = (0.01, 0.25)
"""First and longest pause, in seconds, between two looks at the store; a choice."""
_RETRY_S = (0.25, 4.0)
"""First and longest pause, in seconds, before the store is tried again; a choice."""
_HEAR_S = 1.0
"""Seconds for the others to hear from rank 0 who is missing; a choice, four of their pauses."""
_EPOCH = "interlace/epoch"
"""Key of the store that counts the attempts."""
_ABSENT_HINT = "see its output: it has ended, is paused or still loads; watchdog.start_s bounds it"
"""Hint where a rank did not come to the meeting."""

_SLACK_S = 10.0
"""Seconds by which `meeting_bound` is later than the meeting's own time limits, whose messages tell
more; a choice."""
_WORDS = "interlace/launcher"
"""Prefix of the keys by which ranks tell the launcher that they joined or left."""


@contextmanager
def meeting_bound(within_s: float) -> Iterator[None]:
    """Ends this process with exit code 44 if meeting the other ranks hangs for longer than
    `within_s`."""
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


def meet(within_s: float = MEET_WITHIN_S) -> tuple[dist.Store, int, int]:
    """(store, rank, world size) from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    All ranks call it. No key of the store was written by another attempt. Raises RunError that
    names the ranks that did not come within `within_s`, or the address that cannot be used.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    token, deadline = uuid.uuid4().hex, time.monotonic() + within_s
    port_deadline = min(deadline, time.monotonic() + PORT_FREE_WITHIN_S)
    pause_s = _RETRY_S[0]
    while True:
        left_s = max(1.0, deadline - time.monotonic())
        try:
            store = _connect(rank, left_s)
            join(store, rank)
            if rank == 0:
                epoch = _lead(store, world_size, deadline, within_s)
            else:
                epoch = _follow(store, rank, token, deadline)
            store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
            return dist.PrefixStore(f"{_EPOCH}/{epoch}/job", store), rank, world_size
        except dist.DistError as error:
            # The port may still be an earlier attempt's, or its store has just ended with it.
            taken = "EADDRINUSE" in str(error)
            if time.monotonic() + pause_s > (port_deadline if taken else deadline):
                raise _unreachable(error, taken=taken) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _RETRY_S[1])


def _connect(rank: int, timeout_s: float) -> dist.Store:
    """torchrun's store if it has one for its ranks, else one that rank 0 hosts.

    As `env://` does it, but rank 0 does not wait for connections, which have no names.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise InputError(
            f"the ranks cannot meet: {' and '.join(missing)} not set in the environment",
            hint="start them with interlace train, torchrun or srun; see docs/guides/train.md",
        )
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not agent,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=not agent,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )


def _lead(store: dist.Store, world_size: int, deadline: float, within_s: float) -> int:
    """Rank 0: draw the epoch, wait for all other ranks, and tell who was accepted."""
    epoch = store.add(_EPOCH, 1)
    topic = dist.PrefixStore(f"{_EPOCH}/{epoch}", store)
    keys = [f"here/{rank}" for rank in range(1, world_size)]
    pause_s = _POLL_S[0]
    while keys and not topic.check(keys):
        if store.add(_EPOCH, 0) != epoch:
            raise RunError(
                "another process has begun a newer attempt of this job as rank 0",
                hint="end the processes of earlier attempts, or give each job a MASTER_PORT of "
                "its own",
            )
        if time.monotonic() > deadline:
            missing = [key.rpartition("/")[2] for key in keys if not topic.check([key])]
            message = _absent(missing, within_s)
            topic.set("given up", message)
            time.sleep(_HEAR_S)  # the store may end with this process
            raise RunError(message, hint=_ABSENT_HINT)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S[1])
    tokens = [token.decode() for token in topic.multi_get(keys)] if keys else []
    topic.set("accepted", json.dumps(tokens))
    return epoch


def _follow(store: dist.Store, rank: int, token: str, deadline: float) -> int:
    """Another rank: answer each newer epoch, until one accepts this very process."""
    answered, pause_s = 0, _POLL_S[0]
    while time.monotonic() <= deadline + 2 * _HEAR_S:
        epoch = store.add(_EPOCH, 0)
        topic = dist.PrefixStore(f"{_EPOCH}/{epoch}", store)
        if epoch > answered:
            topic.set(f"here/{rank}", token)
            answered, pause_s = epoch, _POLL_S[0]
        if answered and topic.check(["given up"]):
            raise RunError(topic.get("given up").decode(), hint=_ABSENT_HINT)
        if epoch and topic.check(["accepted"]):
            accepted = json.loads(topic.get("accepted"))
            if accepted[rank - 1 : rank] == [token] and store.add(_EPOCH, 0) == epoch:
                return epoch
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S[1])
    raise RunError(
        f"rank 0 began no attempt with this process as rank {rank}",
        hint="see the output of rank 0; another process may be rank "
        f"{rank} of this job, or another job use its MASTER_ADDR and MASTER_PORT",
    )


def _absent(missing: list[str], within_s: float) -> str:
    named = ", ".join(missing[:8]) + (" and more" if len(missing) > 8 else "")
    ranks = f"ranks {named} have" if len(missing) > 1 else f"rank {named} has"
    return f"{ranks} not joined the run within {within_s:g} s"


def _unreachable(error: Exception, *, taken: bool) -> RunError:
    reason = str(error).splitlines()[0][:300]
    if taken:
        return RunError(
            f"the port that rank 0 must listen on is in use: {reason}",
            hint="end what listens there (an earlier attempt?), or set another MASTER_PORT",
        )
    return RunError(
        f"the ranks cannot meet: {reason}",
        hint="MASTER_ADDR and MASTER_PORT must name the host of rank 0, reachable from here",
    )
