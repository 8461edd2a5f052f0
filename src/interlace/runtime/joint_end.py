"""Ends the step of a pipeline on all its ranks when one of them cannot go on, and says why.

A rank that raises leaves its reason in the store of the process groups and closes its connections,
which frees who waits for it; they do the same. What no connection tells ends by the bound that
every wait has: a rank that is paused, and on gloo the receive of a message of which a part has
come. No thread runs while all is well.
"""

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from interlace.errors import InputError, InterlaceError, RunError
from interlace.graphs.collectives import on_gloo
from interlace.graphs.torch_private import gloo_timeout, set_group_timeout
from interlace.ranks.watchdog import from_communication

WAIT_S = 600.0
"""Seconds that a rank waits for another one by default: those of NCCL's groups in PyTorch. A rank
may write a checkpoint meanwhile."""
_STORE_S = 5.0
"""Seconds in which the store answers, or counts as gone; a choice. No timeout of its own ends a
request to a process that is paused."""
_NOTHING_TAG = 2**31 - 1
"""A tag of messages that nobody sends."""
_KEY = "interlace/pipeline/last_words"
_MOST_TEXT = 1000
"""Characters of a reason that others read; a choice."""


class Unended(RunError):
    """A rank waited for another one in vain."""


@dataclass(frozen=True, slots=True)
class Word:
    """Why a rank of the job cannot go on."""

    rank: int
    """Among all ranks."""
    text: str


class JointEnd:
    """The end of a step that fails, for one rank of a pipeline."""

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], device_type: str, wait_s: float
    ) -> None:
        """`groups` are all those in which this rank meets others in a step, with tensors on devices
        of this type; they can not be used any more after a failure. `wait_s` bounds each wait.
        Raises InputError unless it is above 0."""
        if not wait_s > 0:
            raise InputError(
                f"a rank cannot wait for {wait_s:g} s", hint="set wait_s above 0, such as 120"
            )
        self.wait_s = wait_s
        self.timeout = timedelta(seconds=wait_s)
        self._groups = [group for group in groups if on_gloo(device_type, group)]
        world = dist.group.WORLD
        assert world is not None
        self._store = world.get_group_store()
        self._rank = dist.get_rank()
        self._heard = self._store.add(_KEY, 0)
        """Words of failures before this one."""

    @contextlib.contextmanager
    def for_all(self) -> Iterator[None]:
        """A context around a step: what a rank raises ends it on all others as well.

        An error of this rank itself is raised as it is. One that another rank has led to, be it
        that it did not send or that a collective broke, says what that rank said."""
        try:
            with self._bounded():
                yield
        except BaseException as error:
            first = self._tell(error)
            self._close()
            waited = isinstance(error, Unended)
            if first is None or not (waited or from_communication(error)):
                raise
            message = error.message if isinstance(error, Unended) else _text(error)
            raise Unended(
                f"{message}; rank {first.rank} said first: {first.text}",
                hint=f"the output of rank {first.rank} says more",
            ) from error

    def others_left(self) -> bool:
        """Whether a rank has left a step since this one was made. Asks the store."""
        try:
            return self._store.add(_KEY, 0) > self._heard
        except RuntimeError:  # nobody can be heard without a store
            return True

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        """A context in which no operation of these groups takes longer than the bound, those inside
        of graphs included; they have their own timeouts again behind it."""
        before = [(group, gloo_timeout(group)) for group in self._groups]
        longer = [(group, timeout) for group, timeout in before if timeout > self.timeout]
        for group, _ in longer:
            set_group_timeout(self.timeout, group)
        try:
            yield
        finally:
            for group, timeout in longer:
                set_group_timeout(timeout, group)

    def _tell(self, error: BaseException) -> Word | None:
        """Leave the reason of this rank; returns the first one of another rank before it."""
        found: list[Word] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # without a store there is nothing to be heard
                number = self._store.add(_KEY, 1)
                text = json.dumps([self._rank, _text(error)])
                self._store.set(f"{_KEY}/{number}", text)
                for earlier in range(self._heard + 1, number):
                    word = Word(*json.loads(self._store.get(f"{_KEY}/{earlier}")))
                    if word.rank != self._rank:
                        found.append(word)
                        return

        asking = threading.Thread(target=ask, name="interlace-last-words", daemon=True)
        asking.start()
        asking.join(timeout=_STORE_S)
        return found[0] if found else None

    def _close(self) -> None:
        """Close the connections of all groups: a wait that is over time does that in gloo, and
        nothing else frees those who wait for this rank."""
        for group in self._groups:
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            if size == 1:
                continue
            nothing = torch.empty(1, dtype=torch.uint8)
            with contextlib.suppress(RuntimeError):  # that it was over time, or was closed before
                work = dist.irecv(
                    nothing, group=group, group_src=(rank + 1) % size, tag=_NOTHING_TAG
                )
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def _text(error: BaseException) -> str:
    text = (
        error.message if isinstance(error, InterlaceError) else f"{type(error).__name__}: {error}"
    )
    return text[:_MOST_TEXT]
