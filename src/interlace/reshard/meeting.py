"""Ranks agree through the store of the process group, so that a missing one is named in time.

A collective among ranks of which one never comes blocks until the timeout of its group, and says
nothing about who is missing.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from interlace.errors import InputError, PeerError
from interlace.ranks.agree import listed, odd_ones
from interlace.reshard.roll import reason

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
"""First and longest pause, in seconds, between two questions to the store; a choice: the others
mostly come at once, and where they do not the store is asked less and less often."""
_LAST_WORDS_S = 2.0
"""Seconds for which rank 0 waits, at most, for the others to read before an error ends it; a
choice."""
_MISSING_HINT = (
    "every rank of both meshes must make this call, in the same order, with the same meshes and, "
    "if given, src_mesh on all of them"
)
"""Hint where a rank did not come to a meeting."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One call that a fixed set of ranks makes together. `store` has keys of its own per call."""

    store: dist.Store
    rank: int
    ranks: Sequence[int]
    """Global ranks, ascending."""
    timeout_s: float
    session: str
    """Names this call, alike on all ranks."""
    number: int
    """Number of this call among all calls of the world, on the lowest of the ranks; 0 on the
    others."""
    topics: list[str] = field(default_factory=list)
    """Gathered so far."""

    def gather(self, topic: str, claim: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """What every rank says about a topic (JSON), by rank; on all ranks alike.

        Raises PeerError naming the ranks that did not come within `timeout_s`.
        """
        self.topics.append(topic)
        self.store.set(f"{topic}/{self.rank}", json.dumps(claim))
        result = f"{topic}/all"
        if self.rank == self.ranks[0]:
            self.store.set(result, self._collect(topic))
        elif not _appears(self.store, [f"{topic}/{self.ranks[0]}"], self.timeout_s):
            raise _missing([self.ranks[0]], self.timeout_s)
        elif not _appears(self.store, [result], 2 * self.timeout_s):
            message = f"rank {self.ranks[0]} gathered nothing in {2 * self.timeout_s:g} s"
            raise PeerError(message, ranks=[self.ranks[0]], hint="see the end of its output")
        found = json.loads(self.store.get(result))
        if self.store.add(f"{topic}/read", 1) == len(self.ranks):  # the last one tidies up
            for key in (result, f"{topic}/read", *(f"{topic}/{rank}" for rank in self.ranks)):
                self.store.delete_key(key)
        if "missing" in found:
            raise _missing(found["missing"], self.timeout_s)
        return {int(rank): said for rank, said in found["claims"].items()}

    @contextlib.contextmanager
    def last_words(self) -> Iterator[None]:
        """A context around all of the meeting: before an error leaves it, rank 0, which may host
        the store, gives the others a moment to read what was gathered last."""
        try:
            yield
        except Exception:
            sleeps = Pauses(_LAST_WORDS_S if self.rank == 0 and self.topics else 0.0)
            while sleeps.next() and self.store.check([f"{self.topics[-1]}/all"]):
                pass
            raise

    def _collect(self, topic: str) -> str:
        keys = {rank: f"{topic}/{rank}" for rank in self.ranks}
        if not _appears(self.store, list(keys.values()), self.timeout_s):
            missing = [rank for rank, key in keys.items() if not self.store.check([key])]
            if missing:
                return json.dumps({"missing": missing})
        claims = {rank: json.loads(self.store.get(key)) for rank, key in keys.items()}
        return json.dumps({"claims": claims})


def open_meeting(store: dist.Store, rank: int, ranks: Sequence[int], timeout_s: float) -> Meeting:
    """The next meeting of these ranks.

    The store counts how often each rank has called, so ranks that make the same calls in the same
    order meet.
    """
    people = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    call = store.add(f"interlace/reshard/{people}/calls/{rank}", 1)
    session = f"interlace/reshard/{people}/{call}"
    number = store.add("interlace/reshard/calls", 1) if rank == min(ranks) else 0
    return Meeting(
        store=dist.PrefixStore(session, store),
        rank=rank,
        ranks=tuple(ranks),
        timeout_s=timeout_s,
        session=session,
        number=number,
    )


def agreed(
    meeting: Meeting, topic: str, claim: Callable[[], Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """`Meeting.gather` of what `claim` makes. An error that it raises on one rank is raised
    there, and as an InputError that names that rank on all others."""
    error = None
    try:
        said = claim()
    except Exception as raised:
        error, said = raised, {"error": reason(raised)}
    claims = meeting.gather(topic, said)
    if error is not None:
        raise error
    for rank, other in claims.items():
        if "error" in other:
            raise InputError(
                f"rank {rank} refused: {other['error']}", hint="correct the call on that rank"
            )
    return claims


def check_equal(claims: Mapping[int, Mapping[str, str]], what: str) -> None:
    """Raises InputError, on all ranks alike, if a rank's digest differs from that of most."""
    odd = odd_ones({rank: claim["digest"] for rank, claim in claims.items()})
    if odd is not None:
        rank, usual = odd.ranks[0], odd.usual
        raise InputError(
            f"rank {rank} has another {what} than rank {usual}: {claims[rank]['shown']}, not "
            f"{claims[usual]['shown']}",
            hint="make the same call with the same settings on all ranks",
        )


class Pauses:
    """Growing sleeps, for a loop that asks the store; they end at a timeout."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._pause_s = _FIRST_PAUSE_S

    def next(self) -> bool:
        """Sleeps; False, at once, if the deadline has passed."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


def _appears(store: dist.Store, keys: list[str], timeout_s: float) -> bool:
    sleeps = Pauses(timeout_s)
    while not store.check(keys):
        if not sleeps.next():
            return False
    return True


def _missing(ranks: Sequence[int], timeout_s: float) -> PeerError:
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {listed(ranks)} have"
    return PeerError(
        f"{who} not joined the resharding within {timeout_s:g} s", ranks=ranks, hint=_MISSING_HINT
    )
