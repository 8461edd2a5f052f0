"""Ends every rank within seconds when one of them dies, stalls or fails, and says which one.

gloo does not notice a peer that is paused or dies inside a large payload before its timeout of
1800 s, and no thread can free a wait that blocks in it; only ending the process helps. So two
daemon threads run beside the training: one sends and checks heartbeats through the store of the
process group, the other ends the process when the first can no longer reach that store.
"""

import atexit
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist

from interlace.errors import InterlaceError, PeerError
from interlace.ranks.ending import (
    LAST_WORDS_S,
    PEER_EXIT_CODE,
    STORE_EXIT_CODE,
    RankTask,
    end_process,
    end_without_shutdown,
)
from interlace.ranks.heartbeat import Heartbeats, Peer, Ring, Verdict
from interlace.ranks.identity import ProcessIdentity
from interlace.ranks.silence import Limits
from interlace.ranks.store_host import StoreHost

_GRACE_S = 0.25
"""Seconds for the main thread to notice by itself before the process is ended; a choice."""
_END_WITHIN_S = 1.5
"""Seconds from the main thread's error to the end of the process; a choice."""
_TICK_S = 0.1
"""Seconds between two looks of a thread at the others; a choice."""
_HURRY_S = 0.1
"""Seconds between rounds while the main thread waits to leave; a choice."""

_COMMUNICATION = ("gloo", "nccl", "c10d", "connection", "broken pipe", "timed out", "socket")
"""Words, in lower case, by which errors of a communication library are told."""


def from_communication(error: BaseException) -> bool:
    """Whether a communication library raised `error` or what led to it.

    gloo raises plain RuntimeErrors: only their text tells.
    """
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, RuntimeError) and any(word in text for word in _COMMUNICATION):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


class Watchdog:
    """A context manager around training, entered by all ranks, under which no rank hangs for ever.

    Enter it as soon as there is a store, before `init_process_group`, which can hang as well;
    leave it after `destroy_process_group`. All ranks enter as many, in the same order; the store
    holds no key of an earlier attempt. A rank that is silent for `dead_after_s`, dies, raises, or
    does not enter within `start_s`, ends all others: where the main thread is blocked, the process
    prints `error: rank 1 (host, pid 7) ...`, calls `on_exit(message)` and exits with 43 (45 when
    the store is gone); where a collective raised, the context raises PeerError with the rank truly
    at fault. A silent rank on the same host is killed. After an error has left the context, the
    process has 1.5 s to end.

    A silent rank on the same host that uses its processor is busy, not dead, for up to `busy_s`.

    Cost: two small requests to the store per rank and heartbeat (write its counter; read its
    ring neighbour's and the verdict) at any world size. The store answers
    2 * world_size / heartbeat_s requests a second: 4,000 for 1,000 ranks at 0.5 s; for 10,000
    ranks use 2 s. The training thread does nothing.

    `process_ends` says that each rank's process ends right after the context: rank 0 then waits
    up to `end_s` for those on its host. `heartbeats` says who watches whom, if not every rank its
    neighbour. Raises InputError as `Limits` does.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        heartbeat_s: float,
        dead_after_s: float,
        busy_s: float = 60.0,
        start_s: float = 120.0,
        end_s: float = 30.0,
        process_ends: bool = False,
        on_exit: Callable[[str], None] | None = None,
        heartbeats: Heartbeats | None = None,
    ) -> None:
        self._limits = Limits(
            heartbeat_s=heartbeat_s,
            dead_after_s=dead_after_s,
            busy_s=busy_s,
            start_s=start_s,
            end_s=end_s,
        )
        self._store = store
        self._world_size = world_size
        self._process_ends = process_ends
        self._on_exit = on_exit
        self._identity = ProcessIdentity.of_this_process(rank)
        self._host = StoreHost(self._limits)
        self._heartbeats = heartbeats
        self._ring: Heartbeats | None = None
        self._rounds = 0
        self._task: RankTask | None = None
        self._wake = threading.Event()
        self._decided = threading.Event()
        self._main_leaves = threading.Event()
        self._told = threading.Event()  # the others have had time to read the verdict
        self._done = threading.Event()
        self._joined = threading.Event()
        self._met = threading.Event()  # the neighbour and rank 0 can be named
        self._stopping = False
        self._reported = False
        self._failure: Verdict | None = None
        self._verdict: Verdict | None = None
        self._verdict_lock = threading.Lock()
        self._exit_lock = threading.Lock()

    # ---- the main thread

    def __enter__(self) -> Self:
        self._begin()
        self._met.wait()  # at most start_s; then the process is ended
        return self

    def enter_alone(self) -> None:
        """Enters without waiting for any other rank: returns after the first beat. Raises PeerError
        if the store cannot be reached."""
        self._begin()
        while not self._joined.wait(timeout=_TICK_S):
            if self._verdict is not None:
                self._main_leaves.set()
                self._end_soon()
                raise self._verdict.error()

    def _begin(self) -> None:
        assert not self._done.is_set(), "a watchdog cannot be entered again"
        self._nowhere = os.open(os.devnull, os.O_WRONLY)  # later no descriptor may be left
        threading.Thread(target=self._guard, name="interlace-dead-man", daemon=True).start()
        try:
            self._ring = self._heartbeats or self._open_ring()
        except BaseException:
            self._done.set()
            raise
        self._heart = threading.Thread(target=self._beat, name="interlace-heartbeat", daemon=True)
        self._heart.start()

    def _open_ring(self) -> Ring:
        # The n-th watchdog of this rank on this store; the same number on all ranks.
        number = self._store.add(f"interlace/watchdog/entered/{self._identity.rank}", 1)
        # A connection of its own: the main thread may block in its. (The type stub lacks clone.)
        own: dist.Store = getattr(self._store, "clone")()  # noqa: B009
        own.set_timeout(timedelta(seconds=self._limits.dead_after_s))
        return Ring(
            dist.PrefixStore(f"interlace/watchdog/{number}", own),
            self._identity,
            self._world_size,
            self._limits,
            process_ends=self._process_ends,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.stop()
        else:
            self.report(error)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tells the others of an error before what is around it is taken down, which may block."""
        try:
            yield
        except SystemExit as error:
            if error.code not in (None, 0):
                self.report(error)
            raise
        except BaseException as error:
            self.report(error)
            raise

    @contextmanager
    def bounded(self, what: str, within_s: float) -> Iterator[None]:
        """Ends the run when this rank takes longer than `within_s` for what is inside, which the
        message calls `what`."""
        self._task = RankTask(what, within_s)
        try:
            yield
        finally:
            self._task = None

    def report(self, error: BaseException) -> None:
        """Tells the others why this rank ends. Raises PeerError if another one is at fault."""
        if self._reported:
            return
        self._reported = True
        if (peer := self.explain(error)) is not None:
            self._end_soon()
            raise peer from error
        if isinstance(error, PeerError) and error.ranks:
            self._fail(Verdict(error.ranks[0], error.message, error.hint))
        elif isinstance(error, InterlaceError):
            self.fail(error.message, hint=error.hint)
        else:
            self.fail(f"{type(error).__name__}: {error}"[:1000])

    def stop(self) -> None:
        """Leaves in peace. Rank 0, whose process may host the store, waits for all others.

        Raises PeerError if another rank fails before that.
        """
        self._stopping = True
        self._main_leaves.set()
        self._wake.set()
        while self._heart.is_alive() and not self._decided.is_set():
            self._heart.join(timeout=_TICK_S)
        if self._verdict is not None:
            self._end_soon()
            raise self._verdict.error()
        self._done.set()
        os.close(self._nowhere)

    def fail(self, message: str, *, hint: str = "") -> None:
        """Tells all other ranks that this one failed; this process then has 1.5 s to end."""
        hint = hint or f"the output of rank {self._identity.rank} says where"
        self._fail(Verdict(self._identity.rank, f"{self._identity} failed: {message}", hint))

    def abandon(self, message: str, *, hint: str) -> None:
        """As `fail`, for a process that goes on: it is watched no longer."""
        assert self._ring is not None
        self._main_leaves.set()
        self._done.set()
        self._ring.decide(Verdict(self._identity.rank, f"{self._identity} failed: {message}", hint))
        self._wake.set()

    def raise_verdict(self) -> None:
        """Raises PeerError if there is a verdict by now."""
        if self._verdict is not None:
            raise self._verdict.error()

    def explain(self, error: BaseException) -> PeerError | None:
        """The rank truly at fault when a collective raised `error`, or None.

        What gloo raises often blames a healthy peer ("Connection closed by peer") that left
        because of a third one. Waits up to dead_after_s + 1 s for the verdict; returns at once
        for an error that no communication library raised.
        """
        if not from_communication(error):
            return None
        self._main_leaves.set()
        self._wake.set()
        if not self._decided.wait(timeout=self._limits.dead_after_s + 1.0):
            self._main_leaves.clear()
        return self._verdict.error() if self._verdict is not None else None

    def _fail(self, verdict: Verdict) -> None:
        self._main_leaves.set()
        self._failure = verdict
        self._wake.set()
        if not self._decided.wait(timeout=_END_WITHIN_S):
            self._publish(verdict)  # the store does not answer: at least this rank says it
        self._end_soon()

    def _end_soon(self) -> None:
        """Bounds what follows an error: tearing down a group can block for ever as well."""
        self._told.wait(timeout=3 * self._limits.heartbeat_s)
        self._heart.join(timeout=_GRACE_S)
        if self._heart.is_alive():
            # It hangs in the store, in C++. If it came back while the interpreter shuts down,
            # Python would end the thread there, and the process would abort.
            atexit.register(end_without_shutdown)
        # The dead-man thread ends the process with the message. It cannot while the interpreter
        # shuts down or a destructor holds its lock; a timer in C can.
        bound_s = _END_WITHIN_S + LAST_WORDS_S
        faulthandler.dump_traceback_later(bound_s, exit=True, file=self._nowhere)

    # ---- the heartbeat thread

    def _beat(self) -> None:
        exit_code = PEER_EXIT_CODE
        assert self._ring is not None
        try:
            self._ring.join()
            self._joined.set()
            verdict = self._watch(self._ring)
            if verdict is None:
                return
            self._publish(verdict)
            self._ring.acknowledge(verdict)
        except RuntimeError as error:  # DistError: no connection to the store, or no answer
            exit_code = STORE_EXIT_CODE
            self._publish(self._host.lost(self._rank_0(), f"is gone ({str(error)[:200]})"))
        self._leave(exit_code)

    def _watch(self, ring: Heartbeats) -> Verdict | None:
        """Rounds until there is a verdict, or until this rank may stop (None)."""
        while True:
            failure = self._failure or self._overrun() or self._host.launcher_ended(self._identity)
            if failure is not None:
                return ring.decide(failure)
            verdict = ring.round()
            self._rounds += 1
            if ring.has_met:
                self._met.set()
            if verdict is not None:
                return verdict
            if self._stopping and ring.stop():
                return None
            hurry = self._main_leaves.is_set()  # the main thread waits for what is read here
            self._wake.wait(timeout=_HURRY_S if hurry else ring.pause_s())
            self._wake.clear()

    def _overrun(self) -> Verdict | None:
        """What this rank does takes too long, though it is alive."""
        if (task := self._task) is None or not task.is_late(2 * self._limits.heartbeat_s):
            return None
        return Verdict(
            self._identity.rank,
            f"{self._identity} takes longer than {task.within_s:g} s for {task.what}",
            "no rank is silent, so a connection between two of them may hang; the time is "
            "bounded by watchdog.start_s and watchdog.end_s",
        )

    # ---- the dead-man thread

    def _guard(self) -> None:
        """Ends the process when the heartbeat thread hangs in the store, or the main thread stays.

        Counts only time in which it ran itself: after a pause of this process nothing is late.
        """
        seen, late_s, last = (-1, False), 0.0, time.monotonic()
        while not self._done.wait(timeout=_TICK_S):
            now = time.monotonic()
            observed_s = min(now - last, 2 * _TICK_S)
            last = now
            progress = (self._rounds, self._decided.is_set())
            heard, seen = progress != seen, progress
            late_s = 0.0 if heard else late_s + observed_s
            if self._decided.is_set():
                if late_s > _END_WITHIN_S:
                    self._exit(PEER_EXIT_CODE)
                continue
            verdict = self._host.look(self._rank_0(), observed_s, heard=heard)
            if verdict is not None:
                self._publish(verdict)
                self._host.kill(self._rank_0())
                self._leave(STORE_EXIT_CODE)

    def _rank_0(self) -> Peer | None:
        return None if self._ring is None else self._ring.store_host

    # ---- leaving, on either thread

    def _publish(self, verdict: Verdict) -> None:
        with self._verdict_lock:
            self._verdict = self._verdict or verdict
        self._decided.set()

    def _leave(self, exit_code: int) -> None:
        """Ends the process unless the main thread is about to do so with an error of its own."""
        self._told.set()
        if not self._main_leaves.wait(timeout=_GRACE_S):
            self._exit(exit_code)

    def _exit(self, exit_code: int) -> None:
        assert self._verdict is not None
        if self._exit_lock.acquire(blocking=False):
            end_process(str(self._verdict.error()), exit_code, self._on_exit)
