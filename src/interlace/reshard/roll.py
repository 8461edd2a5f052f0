"""Which transfers of a plan each rank has begun, and which it refused or gave up."""

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from interlace.errors import InputError, InterlaceError, PeerError, RunError

_CLOSED_HINT = "make a new plan on all ranks: what a rank left out, the others cannot guess"
"""Hint where a rank has closed the plan."""
_STEP_HINT = "call start equally often on all ranks, with the same step"
"""Hint where ranks are at different transfers or steps of a plan."""
_TURNS_HINT = "with NCCL, start plans in the same order on all ranks"
"""Hint where two ranks begin transfers in different orders."""


class Roll:
    """What this rank says about its transfers of one plan, and what the others say about theirs.

    Transfers are counted from 1, and only those that were begun. The store has one key for each
    rank: what it says about its last two transfers. That is enough, since a rank ends a transfer
    only when all that it exchanges messages with have begun it: none of them is two behind.

    Once a rank has refused or given up a transfer, it begins no other: the plan is closed there.
    Another number could not tell its next tensors from those that it left out.
    """

    def __init__(self, store: dist.Store, rank: int, title: str) -> None:
        self.title = title
        """What messages call the plan."""
        self.number = 0
        """How many transfers this rank has begun."""
        self.closed: InterlaceError | None = None
        self.under_way = False
        self._store = store
        self._rank = rank
        self._said: dict[int, dict[str, Any]] = {}
        self._say()  # so that nobody has to ask whether there is such a key

    def check_idle(self) -> None:
        """Raises InputError while a transfer is under way."""
        if self.under_way:
            raise InputError(
                f"{self.transfer(self.number)} is still under way",
                hint="call wait on its handle first",
            )

    def begin(self, *, step: int | None = None, turns: Mapping[int, int] | None = None) -> int:
        """Says that this rank begins its next transfer; returns its number.

        `turns`: how many transfers of any plan this rank has begun with each rank by now, where
        only the order of messages tells them apart.
        """
        self.number += 1
        self.under_way = True
        self._said = {at: said for at, said in self._said.items() if at == self.number - 1}
        self._said[self.number] = {"step": step, "turns": dict(turns or {})}
        self._say()
        return self.number

    def end(self) -> None:
        """Notes that the transfer has arrived."""
        self.under_way = False

    def refuse(self, error: BaseException) -> None:
        """Says that this rank will not begin its next transfer, and closes the plan."""
        number, why = self.number + 1, reason(error)
        self.closed = self._closing(f"{self.transfer(number)} was refused: {why}", error)
        self._said[number] = {"refused": why}
        self._tell(error)

    def fail(self, number: int, error: BaseException, *, tell: bool) -> None:
        """Closes the plan since a transfer failed; `tell` where no watchdog says it."""
        why = reason(error)
        self.under_way = False
        self.closed = self._closing(f"{self.transfer(number)} failed: {why}", error)
        if tell:
            ranks = error.ranks if isinstance(error, PeerError) else (self._rank,)
            self._said.setdefault(number, {}).update({"failed": why, "ranks": ranks})
            self._tell(error)

    def begun(self, peer: int, number: int) -> bool:
        """Whether the peer has begun this transfer of this rank.

        Raises PeerError if it refused to or gave it up, or began it as another step or in another
        order than this rank.
        """
        said = self._said_by(peer)
        last = max(said, default=0)
        at = min(number, last)  # who closed the plan before will not begin this one either
        theirs = said.get(at, {})
        if "refused" in theirs:
            message = f"rank {peer} refused to begin {self.transfer(at)}: {theirs['refused']}"
            raise PeerError(message, ranks=[peer], hint="see its output")
        if at == number and "step" in theirs:
            self._check_same(peer, number, theirs)
        if "failed" in theirs:
            message = f"rank {peer} gave up {self.transfer(at)}: {theirs['failed']}"
            raise PeerError(message, ranks=theirs["ranks"], hint="see the end of its output")
        if last > number and not theirs:
            what = f"rank {peer} is at {self.transfer(last)} when this rank is at {number}"
            raise PeerError(what, ranks=[peer], hint=_STEP_HINT)
        return last >= number

    def _check_same(self, peer: int, number: int, theirs: Mapping[str, Any]) -> None:
        """Raises PeerError unless the peer means this transfer as this rank does."""
        ours, hint = self._said[number], _STEP_HINT
        ours_turn, turn = ours["turns"].get(peer), theirs["turns"].get(str(self._rank))
        if theirs["step"] != ours["step"]:
            what = (
                f"rank {peer} began {self.transfer(number)} as step {theirs['step']}, rank "
                f"{self._rank} as step {ours['step']}"
            )
        elif turn != ours_turn:
            hint = _TURNS_HINT
            what = (
                f"ranks {peer} and {self._rank} begin transfers in different orders: "
                f"{self.transfer(number)} is number {turn} between them on rank {peer}, and "
                f"{ours_turn} on rank {self._rank}"
            )
        else:
            return
        raise PeerError(what, ranks=[peer, self._rank], hint=hint)

    def ahead(self, peer: int) -> str:
        """The transfer that a peer has begun and this rank has not; empty if there is none."""
        if not self._store.check([_key(peer)]):  # not a rank of this plan
            return ""
        begun = [at for at, said in self._said_by(peer).items() if "step" in said]
        return self.transfer(max(begun)) if max(begun, default=0) > self.number else ""

    def transfer(self, number: int) -> str:
        """What messages call a transfer."""
        return f"transfer {number} of {self.title}"

    def _said_by(self, peer: int) -> dict[int, dict[str, Any]]:
        said = json.loads(self._store.get(_key(peer)))
        return {int(number): about for number, about in said.items()}

    def _say(self) -> None:
        self._store.set(_key(self._rank), json.dumps(self._said))

    def _tell(self, error: BaseException) -> None:
        """Says it though an error is on its way, which a lost store must not hide."""
        try:
            self._say()
        except RuntimeError as lost:
            error.add_note(f"the other ranks could not be told: {lost}")

    def _closing(self, why: str, error: BaseException) -> InterlaceError:
        message = f"the plan is closed on this rank, since {why}"
        if isinstance(error, PeerError):
            return PeerError(message, ranks=error.ranks, hint=_CLOSED_HINT)
        kind = InputError if isinstance(error, InputError) else RunError
        return kind(message, hint=_CLOSED_HINT)


def _key(rank: int) -> str:
    return f"begun/{rank}"


def fresh(error: InterlaceError) -> InterlaceError:
    """The same error to raise again, without the frames that the first was raised in."""
    if isinstance(error, PeerError):
        return PeerError(error.message, ranks=error.ranks, hint=error.hint)
    return type(error)(error.message, hint=error.hint)


def reason(error: BaseException) -> str:
    """An error in the words of another."""
    if isinstance(error, InterlaceError):
        return error.message
    return f"{type(error).__name__}: {error}"[:500]
