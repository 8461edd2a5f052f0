"""Start the ranks of a run on this machine with torch's elastic process library, and end them.

`torch.distributed.elastic.multiprocessing` starts the processes, waits for them and forwards
signals. torchrun's agent on top of it is not used, for two reasons: it gives the ranks of a failed
run 30 s to end, whatever `shutdown_timeout` says, and a paused rank always takes all of that; and
one machine needs no rendezvous. As under that agent, the store that the ranks meet at lives in
this process, so it outlives every rank.
"""

import contextlib
import logging
import os
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    RunProcsResult,
    SignalException,
    SubprocessContext,
)

from interlace.config import WatchdogConfig
from interlace.errors import InputError, RunError
from interlace.ranks.attempt import said
from interlace.ranks.ending import PEER_EXIT_CODE, START_EXIT_CODE, STORE_EXIT_CODE
from interlace.ranks.identity import ProcessView
from interlace.ranks.launched import CORES, LAUNCHER_PID
from interlace.ranks.supervise import PAUSED_HINT, Fault, Supervisor

FAILED_GRACE_S = 3
"""Seconds for the other ranks to end after one failed, then SIGKILL; a choice
(docs/decisions/0005)."""
STOP_GRACE_S = 12
"""Seconds for all ranks to end after SIGINT or SIGTERM, then SIGKILL; a choice. A rank ends itself
10 s after the signal if its step has not ended by then (`signals.StopFlag`)."""

_POLL_S = 0.05
"""Seconds between two looks at the ranks; a choice."""
_CAUSE_S = 1.0
"""Seconds in which the rank at fault may still end after those that noticed it; a choice."""
_VICTIMS = {PEER_EXIT_CODE, START_EXIT_CODE, STORE_EXIT_CODE}
"""Exit codes of ranks that ended because of another one."""
_BAD_INPUT = 2
"""Exit code of a rank that was given something wrong (`errors.InputError`)."""
_SEE_ABOVE = "its own message is above"
"""Hint where a rank ended with an exit code: it printed why."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a run."""


class Stopped(RunError):
    """The user ended the run by a signal; the exit code is the shell's, 128 + signal."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(f"stopped by {by.name}; all ranks have ended")
        self.exit_code = 128 + by


class _Ranks(SubprocessContext):
    """Rank processes that end within seconds, and how each stood when the first one ended."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.codes: dict[int, int | None] = {}
        self.paused: list[int] = []
        self.were_paused: list[int] = []
        self.fault: Fault | None = None

    def close(self, death_sig: signal.Signals | None = None, timeout: int = FAILED_GRACE_S) -> None:
        """Signal the ranks that still run, wait, then SIGKILL; torch calls it on a failure."""
        if not self.codes:
            self._wait_for_cause()
            self.codes = self.codes_now()
            self.paused = [
                rank for rank, code in self.codes.items() if code is None and self._is_paused(rank)
            ]
            for rank in self.paused:  # no other signal reaches them
                self.kill(rank)
        super().close(death_sig, timeout)

    def codes_now(self) -> dict[int, int | None]:
        """The exit code of each rank that has ended, by now."""
        handlers = self.subprocess_handlers.items()
        return {rank: handler.proc.poll() for rank, handler in handlers}

    def kill(self, rank: int) -> None:
        """SIGKILL to a rank, and to the processes that it started."""
        self.subprocess_handlers[rank].close(signal.SIGKILL)

    def wait_watched(self, eye: Supervisor | None) -> RunProcsResult:
        """Waits until all ranks have ended or one has failed; ends the one that `eye` finds."""
        while (result := self.wait(timeout=0)) is None:
            time.sleep(_POLL_S)
            if eye is None or self.fault is not None:
                continue
            self.fault = eye.look()
            self.were_paused = eye.were_paused()
            if self.fault is not None and self.codes_now()[self.fault.rank] is None:
                self.kill(self.fault.rank)
            elif self.fault is not None:  # it has ended, but without an error
                self.close(signal.SIGTERM)
        return result

    def failure(self) -> RunError | InputError:
        """The error that names the rank at fault."""
        if self.fault is not None:
            return RunError(f"rank {self.fault.rank} {self.fault.what}", hint=self.fault.hint)
        ended = [rank for rank in self.were_paused if self.codes[rank] is not None]
        return _failure(self.codes, sorted({*self.paused, *ended}))

    def _is_paused(self, rank: int) -> bool:
        sight = ProcessView.of_pid(self.subprocess_handlers[rank].proc.pid).look()
        return sight is not None and sight.paused

    def _wait_for_cause(self) -> None:
        """A rank that left because of another may end first; the one at fault ends soon after."""
        deadline = time.monotonic() + _CAUSE_S
        while time.monotonic() < deadline:
            codes = [handler.proc.poll() for handler in self.subprocess_handlers.values()]
            ended = [code for code in codes if code is not None]
            if not ended or not set(ended) <= _VICTIMS or len(ended) == len(codes):
                return
            time.sleep(_POLL_S)


def launch(
    command: Sequence[str],
    *,
    ranks: int,
    cores_per_rank: int = 1,
    verbose: bool = False,
    watchdog: WatchdogConfig = WatchdogConfig(),  # noqa: B008  frozen
    must_join: bool = False,
) -> None:
    """Run `command` as `ranks` processes with torchrun's environment, until all have ended.

    Output goes straight through. With enough cores and no GPU, each rank keeps to its own
    `cores_per_rank` (Linux). The first rank to fail ends the others, as does one that is paused,
    or does not join or end, within the bounds of `watchdog`; with `must_join` every rank has to
    join a process group as `ranks.process_group` does it. Raises RunError naming that
    rank, InputError if it exited with 2, and Stopped after SIGINT, SIGTERM, SIGHUP or SIGQUIT;
    no process is left in any case.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _Ranks(
        name="interlace",
        entrypoint=command[0],
        args={rank: tuple(command[1:]) for rank in range(ranks)},
        envs=_environments(ranks, store.port, cores_per_rank),
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    with _elastic_log(verbose), _restored_signals() as before:
        try:
            context.start()  # handles _SIGNALS by raising SignalException
            for number in _SIGNALS:
                if before[number] == signal.SIG_IGN:  # nohup
                    signal.signal(number, signal.SIG_IGN)
            eye = _supervisor(context, store, watchdog, must_join=must_join)
            result = context.wait_watched(eye)
        except SignalException as error:
            with contextlib.suppress(SignalException):  # a second Ctrl-C kills at once
                context.close(error.sigval, STOP_GRACE_S)
            raise Stopped(error.sigval) from None
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            context.close(signal.SIGKILL, FAILED_GRACE_S)
    if result.is_failed() or context.fault is not None:
        raise context.failure()


def _supervisor(
    context: _Ranks, store: TCPStore, limits: WatchdogConfig, *, must_join: bool
) -> Supervisor | None:
    if not limits.enabled:
        return None
    pids = {rank: handler.proc.pid for rank, handler in context.subprocess_handlers.items()}
    return Supervisor(pids, context.codes_now, partial(said, store), limits, must_join=must_join)


def _environments(ranks: int, port: int, cores_per_rank: int) -> dict[int, dict[str, str]]:
    """What torchrun sets for each rank, and what `launched.follow_launcher` reads."""
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER_PID: str(os.getpid()),
    }
    environments = {
        rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
    }
    if hasattr(os, "sched_getaffinity") and not torch.cuda.is_available():
        cores = assign_cores(sorted(os.sched_getaffinity(0)), ranks, cores_per_rank)
        for rank, own in cores.items():
            environments[rank][CORES] = ",".join(map(str, own))
    return environments


def assign_cores(cores: Sequence[int], ranks: int, cores_per_rank: int) -> dict[int, list[int]]:
    """Disjoint cores for each rank, or nothing when there are too few."""
    if ranks * cores_per_rank > len(cores):
        return {}
    return {
        rank: list(cores[rank * cores_per_rank : (rank + 1) * cores_per_rank])
        for rank in range(ranks)
    }


def _failure(codes: Mapping[int, int | None], paused: Sequence[int]) -> RunError | InputError:
    """The error that names the rank at fault, from how the ranks stood when the first one ended.

    A rank that was paused made the others give up; one that was ended by a signal made its peers
    exit with a code, perhaps within the same look; exit codes of the watchdog blame another rank.
    """
    failed = {rank: code for rank, code in codes.items() if code}
    first = min(failed, key=lambda rank: (failed[rank] > 0, failed[rank] in _VICTIMS, rank))
    if paused:
        whom = "" if first == paused[0] else f"rank {first} "
        return RunError(
            f"rank {paused[0]} was paused (SIGSTOP), and {whom}{_ending(failed[first])}",
            hint=PAUSED_HINT,
        )
    message = f"rank {first} {_ending(failed[first])}"
    if failed[first] == -signal.SIGKILL:
        return RunError(
            message,
            hint="when memory runs out, the kernel does this: lower train.micro_batch_size",
        )
    if failed[first] == _BAD_INPUT:
        return InputError(message, hint=_SEE_ABOVE)
    return RunError(message, hint=_SEE_ABOVE)


def _ending(code: int) -> str:
    """`exited with code 1`, or `was ended by SIGKILL` for -9."""
    if code > 0:
        return f"exited with code {code}"
    known = {int(number): number.name for number in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"


@contextlib.contextmanager
def _elastic_log(verbose: bool) -> Iterator[None]:
    """Keep torch's own account of the ending, which `_failure` gives in one line, for -v."""
    log = logging.getLogger(SubprocessContext.__module__)
    before = log.level
    if not verbose:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def _restored_signals() -> Iterator[dict[signal.Signals, Any]]:
    """Put the handlers of _SIGNALS back at the end; gives those that were there."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
