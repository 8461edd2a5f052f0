"""Ends every rank within seconds when one of them dies, stalls or fails, and says which one.

gloo does not notice a peer that is paused or dies inside a large payload before its timeout of
1800 s, and no thread can free a wait that blocks in it; only ending the process helps. So two
daemon threads run beside the training: one sends and checks heartbeats through the store of the
process group, the other ends the process when the first can no longer reach that store.
"""

import atexit
import faulthandler
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from interlace.errors import InputError, InterlaceError, PeerError, RunError
from interlace.runtime.agreement import collective_device
from interlace.runtime.heartbeat import DIED_HINT, Ring, Verdict
from interlace.runtime.identity import ProcessIdentity

PEER_EXIT_CODE = 43
"""Another rank is at fault, and the main thread was blocked."""
STORE_EXIT_CODE = 45
"""The store cannot be reached, and the main thread was blocked."""

_STORE_SLACK_S = 0.5  # the store may be silent this much longer than a rank
_GRACE_S = 0.25  # for the main thread to notice by itself before the process is ended
_END_WITHIN_S = 1.5  # from the main thread's error to the end of the process
_TICK_S = 0.1
_HURRY_S = 0.1
_LAST_WORDS_S = 0.5
_COMMUNICATION = ("gloo", "nccl", "c10d", "connection", "broken pipe", "timed out", "socket")


class Watchdog:
    """No hang, ever: a context manager around training, entered by all ranks.

    Enter it right after `init_process_group` (it begins with two small all-reduces), with the
    store of the group; leave it before `destroy_process_group`. Inside it, a rank that is silent
    for `dead_after_s`, dies or raises ends all others: where the main thread is blocked, the
    process prints `error: rank 1 (host, pid 7) ...`, calls `on_exit(message)` and exits with 43
    (45 when the store is gone); where a collective raised, the context raises PeerError with the
    rank truly at fault. A silent rank on the same host is killed. After an error has left the
    context, the process has 1.5 s to end.

    Cost: two small requests to the store per rank and heartbeat (write its counter; read its
    ring neighbour's and the verdict) at any world size. The store answers
    2 * world_size / heartbeat_s requests a second: 4,000 for 1,000 ranks at 0.5 s; for 10,000
    ranks use 2 s. The training thread does nothing.

    A rank whose native code holds the interpreter lock for `dead_after_s` counts as silent.
    Raises InputError if `dead_after_s` is less than two heartbeats.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        heartbeat_s: float,
        dead_after_s: float,
        on_exit: Callable[[str], None] | None = None,
    ) -> None:
        if not 0 < 2 * heartbeat_s <= dead_after_s:
            raise InputError(
                f"a rank cannot be dead after {dead_after_s} s with a heartbeat of {heartbeat_s} s",
                hint="set dead_after_s to at least twice heartbeat_s, and heartbeat_s above 0",
            )
        self._store = store
        self._world_size = world_size
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._on_exit = on_exit
        self._identity = ProcessIdentity.of_this_process(rank)
        self._parent_pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._launcher_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._rounds = 0
        self._wake = threading.Event()
        self._decided = threading.Event()
        self._main_leaves = threading.Event()
        self._told = threading.Event()  # the others have had time to read the verdict
        self._done = threading.Event()
        self._stopping = False
        self._failure: Verdict | None = None
        self._verdict: Verdict | None = None
        self._verdict_lock = threading.Lock()
        self._exit_lock = threading.Lock()

    # ---- the main thread

    def __enter__(self) -> Self:
        assert not self._done.is_set(), "a watchdog cannot be entered again"
        # Random, and one for all ranks: the store of a launcher outlives a failed attempt.
        session = _largest(secrets.randbits(62), self._world_size)
        # A connection of its own: the main thread may block in its. (The type stub lacks clone.)
        own: dist.Store = getattr(self._store, "clone")()  # noqa: B009
        own.set_timeout(timedelta(seconds=self._dead_after_s))
        self._ring = Ring(
            dist.PrefixStore(f"interlace/watchdog/{session:x}", own),
            self._identity,
            self._world_size,
            heartbeat_s=self._heartbeat_s,
            dead_after_s=self._dead_after_s,
        )
        self._ring.join()
        _largest(0, self._world_size)  # a barrier
        self._ring.meet()
        self._heart = threading.Thread(target=self._beat, name="interlace-heartbeat", daemon=True)
        self._heart.start()
        threading.Thread(target=self._guard, name="interlace-dead-man", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.stop()
        elif (peer := self.explain(error)) is not None:
            self._end_soon()
            raise peer from error
        elif isinstance(error, PeerError) and error.ranks:
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

    def fail(self, message: str, *, hint: str = "") -> None:
        """Tells all other ranks that this one failed; this process then has 1.5 s to end."""
        hint = hint or f"the output of rank {self._identity.rank} says where"
        self._fail(Verdict(self._identity.rank, f"{self._identity} failed: {message}", hint))

    def explain(self, error: BaseException) -> PeerError | None:
        """The rank truly at fault when a collective raised `error`, or None.

        What gloo raises often blames a healthy peer ("Connection closed by peer") that left
        because of a third one. Waits up to dead_after_s + 1 s for the verdict; returns at once
        for an error that no communication library raised.
        """
        if not _from_communication(error):
            return None
        self._main_leaves.set()
        self._wake.set()
        if not self._decided.wait(timeout=self._dead_after_s + 1.0):
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
        self._told.wait(timeout=2 * self._heartbeat_s)
        self._heart.join(timeout=_GRACE_S)
        if self._heart.is_alive():
            # It hangs in the store, in C++. If it came back while the interpreter shuts down,
            # Python would end the thread there, and the process would abort.
            atexit.register(_exit_without_shutdown)
        # The dead-man thread ends the process with the message. It cannot while the interpreter
        # shuts down or a destructor holds its lock; a timer in C can.
        devnull = os.open(os.devnull, os.O_WRONLY)
        bound_s = _END_WITHIN_S + _LAST_WORDS_S
        faulthandler.dump_traceback_later(bound_s, exit=True, file=devnull)

    # ---- the heartbeat thread

    def _beat(self) -> None:
        exit_code = PEER_EXIT_CODE
        try:
            verdict = self._watch()
            if verdict is None:
                return
            self._publish(verdict)
            self._ring.acknowledge(verdict)
        except RuntimeError as error:  # DistError: no connection to the store, or no answer
            exit_code = STORE_EXIT_CODE
            self._publish(self._store_verdict(f"is gone ({str(error)[:200]})"))
        self._leave(exit_code)

    def _watch(self) -> Verdict | None:
        """Rounds until there is a verdict, or until this rank may stop (None)."""
        while True:
            if self._failure is not None:
                return self._ring.decide(self._failure)
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                message = f"the launcher (pid {self._parent_pid}) of {self._identity} has ended"
                return self._ring.decide(Verdict(None, message, "start the run again"))
            verdict = self._ring.round()
            self._rounds += 1
            if verdict is not None:
                return verdict
            if self._stopping and self._ring.stop():
                return None
            hurry = self._main_leaves.is_set()  # the main thread waits for what is read here
            self._wake.wait(timeout=_HURRY_S if hurry else self._ring.pause_s())
            self._wake.clear()

    # ---- the dead-man thread

    def _guard(self) -> None:
        """Ends the process when the heartbeat thread hangs in the store, or the main thread stays.

        Counts only time in which it ran itself: after a pause of this process nothing is late.
        """
        seen, late_s, last = (-1, False), 0.0, time.monotonic()
        while not self._done.wait(timeout=_TICK_S):
            now = time.monotonic()
            late_s += min(now - last, 2 * _TICK_S)
            last = now
            progress = (self._rounds, self._decided.is_set())
            if progress != seen:
                seen, late_s = progress, 0.0
            elif self._decided.is_set():
                if late_s > _END_WITHIN_S:
                    self._exit(PEER_EXIT_CODE)
            elif late_s > self._dead_after_s + _STORE_SLACK_S:
                self._publish(self._store_verdict(f"did not answer for {late_s:.1f} s"))
                if not self._launcher_hosts_store:
                    self._ring.store_host.kill()  # paused on this host: nobody else ends it
                self._leave(STORE_EXIT_CODE)

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
        if not self._exit_lock.acquire(blocking=False):
            return
        message = str(self._verdict.error())
        os.write(2, f"error: {message}\n".encode())  # sys.stderr may be locked by a blocked thread
        last_words = threading.Thread(target=self._last_words, args=(message,), daemon=True)
        last_words.start()
        last_words.join(timeout=_LAST_WORDS_S)
        os._exit(exit_code)

    def _last_words(self, message: str) -> None:
        if self._on_exit is not None:
            self._on_exit(message)
        sys.stdout.flush()

    def _store_verdict(self, what: str) -> Verdict:
        hint = "it has ended, is paused, or its host cannot be reached"
        host = self._ring.store_host
        if self._launcher_hosts_store:
            return Verdict(None, f"the launcher, which hosts the store, {what}", hint)
        if host.ended():
            return Verdict(0, f"{host}, which hosted the store, died", DIED_HINT)
        return Verdict(0, f"{host}, which hosts the store, {what}", hint)


def _exit_without_shutdown() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _largest(number: int, world_size: int) -> int:
    """The maximum over all ranks. Small payloads: gloo notices a peer that dies here."""
    if world_size == 1:
        return number
    value = torch.tensor([number], dtype=torch.int64, device=collective_device(None))
    try:
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    except RuntimeError as error:
        hint = "see the output of the other ranks"
        raise RunError(f"a rank ended before the run began: {error}", hint=hint) from error
    return int(value.item())


def _from_communication(error: BaseException) -> bool:
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
