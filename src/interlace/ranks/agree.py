"""All ranks prove, before the first step, that they are about to run the same thing.

A disagreement that slips through is not noticed by gloo: ranks that differ in dtype, order or
reduce operation compute garbage in silence. Ranks that differ in their weights train two models.

Only digests travel. While all is well these are two collectives of 40 bytes and of 32 bytes per
layout from each rank; which content differs is asked for when one does.
"""

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import interlace
from interlace.errors import InterlaceError, PeerError
from interlace.ranks.small_collectives import alone, gather_bytes

SAME_START = "start all ranks with the same files, versions and environment"
"""Hint where what ranks compare at the start differs."""
_SHOWN_CHARACTERS = 200
"""Characters up to which a message shows a compared text or list of names; a choice: about two
lines of a terminal."""
_MOST_TEXT_BYTES = 512
"""Bytes to which a rank's error message is cut for the others; a choice that keeps the gathered
records of a fixed, small size."""
_HALF = 16
"""Bytes of SHA-256 that are compared, half of them: a choice, 128 bits are enough to tell contents
apart, and less travels."""
_AT_ONCE = 256
"""Contents whose digests are gathered together in search of one that differs; a choice: 12 KiB per
rank."""
_FLAG_PREFIXES = ("TORCH_", "NCCL_", "GLOO_")
"""Beginnings of the environment variables that must be equal on all ranks."""
# Parts of names of variables that differ from host to host, or do not change what is computed.
_LOCAL_WORDS = (
    "IFNAME", "ADDR", "HCA", "HOSTID", "COMM_ID", "FILE", "DIR", "PATH", "HOME", "DEBUG", "LOGS",
    "PORT", "CPP_LOG", "SHOW_CPP",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Something that ranks hold alike, by its digest."""

    name: str
    """As an error says it: `weight 'norm.weight'`."""
    digest: bytes
    shown: str = ""
    """What it is on this rank, in words; empty if only the digest can be shown."""
    layout: str = ""
    """How it is dealt out, equal on all ranks. Ranks that hold the same part of one content of a
    layout hold the same part of all."""
    part: str = ""
    """Which part of it this rank holds: it must be equal on all ranks that name the same part."""


@dataclass(frozen=True, slots=True)
class Odd:
    """Ranks that differ from the others."""

    ranks: list[int]
    usual: int
    """The lowest of the ranks that the first of them differs from."""
    others: int
    """How many ranks they differ from."""


def odd_ones(
    values: Mapping[int, Hashable], *, parts: Mapping[int, Hashable] | None = None
) -> Odd | None:
    """The ranks whose value differs from that of most ranks; if `parts` says which part each rank
    holds, from that of most ranks with the same part. None if there are none. A tie goes to the
    lowest rank."""
    ranks = sorted(values)
    part_of = {rank: parts[rank] if parts else None for rank in ranks}
    counts: dict[Hashable, Counter[Hashable]] = {}
    for rank in ranks:
        # A counter keeps the order of first appearance.
        counts.setdefault(part_of[rank], Counter())[values[rank]] += 1
    usual = {part: of_part.most_common(1)[0] for part, of_part in counts.items()}
    odd = [rank for rank in ranks if values[rank] != usual[part_of[rank]][0]]
    if not odd:
        return None
    first = part_of[odd[0]]
    return Odd(
        odd,
        next(r for r in ranks if part_of[r] == first and values[r] == usual[first][0]),
        sum(usual[part][1] for part in {part_of[rank] for rank in odd}),
    )


def check_agreement(fields: Mapping[str, str], *, group: dist.ProcessGroup | None = None) -> None:
    """Compares named texts ("configuration", "plan", "graph") across the ranks of `group`.

    Collective, on the default group if none is given; a world of one agrees with itself. Raises
    PeerError, on all ranks alike, naming the first field that differs and the ranks in the
    minority.
    """
    contents = []
    for name, text in fields.items():
        shown = text if len(text) <= _SHOWN_CHARACTERS else f"{len(text)} characters"
        contents.append(Content(name=repr(name), digest=_digest(text), shown=repr(shown)))
    check_contents(contents, group=group)


def check_contents(
    contents: Sequence[Content],
    *,
    group: dist.ProcessGroup | None = None,
    hint: str = SAME_START,
) -> None:
    """Compares contents, each among the ranks that hold the same part of it.

    Collective, as `check_agreement`; every rank gives the same names in the same order. Raises
    PeerError, on all ranks alike, naming the first content that differs and the ranks in the
    minority.
    """
    if alone(group):
        return
    own = list(contents)
    listed = _digest("\n".join(f"{each.layout}\0{each.name}" for each in own))
    lists = _gather([listed + len(own).to_bytes(8)], group)[0]
    if len(set(lists)) == 1 and (not own or _layouts_agree(own, group)):
        return
    longest = max(int.from_bytes(each[-8:]) for each in lists)
    for start in range(0, longest, _AT_ONCE):
        places = range(start, min(start + _AT_ONCE, longest))
        for place, of_ranks in zip(
            places, _gather([_record(own, place) for place in places], group), strict=True
        ):
            _refuse_difference(own, place, of_ranks, group, hint)
    raise AssertionError("ranks hold the same part of one content of a layout and not of another")


@contextmanager
def refused_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A context around what each rank does by itself, without collectives: if one raises, all do.

    Otherwise the others would wait for it in their next collective. Collective at its end. A rank
    that raised nothing itself raises PeerError with the message of the first that did.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # raised again below, when the others know
        own = error
    said = ""
    if own is not None:
        said = own.message if isinstance(own, InterlaceError) else f"{type(own).__name__}: {own}"
    refusals = [said] if alone(group) else _texts(said, group)
    if own is not None:
        raise own
    for rank, text in enumerate(refusals):
        if text:
            at_fault = rank if group is None else dist.get_global_rank(group, rank)
            raise PeerError(
                f"rank {at_fault} refused: {text}",
                ranks=[at_fault],
                hint="see the output of that rank; ranks must run the same program",
            )


def _texts(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """All ranks' texts, cut to `_MOST_TEXT_BYTES`, by rank within the group."""
    record = text.encode()[:_MOST_TEXT_BYTES].ljust(_MOST_TEXT_BYTES, b"\0")
    (of_ranks,) = _gather([record], group)
    return [each.rstrip(b"\0").decode(errors="ignore") for each in of_ranks]


def environment_fields() -> dict[str, str]:
    """What must be equal in the software of all ranks, as fields for `check_agreement`.

    "environment" holds the TORCH_*, NCCL_* and GLOO_* variables, without addresses, interface
    names, paths and logging.
    """
    flags = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_FLAG_PREFIXES) and not any(word in name for word in _LOCAL_WORDS)
    }
    return {
        "interlace version": interlace.__version__,
        "torch version": str(torch.__version__),
        "python version": platform.python_version(),
        "environment": " ".join(f"{name}={value}" for name, value in flags.items()),
    }


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _half(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(content).digest()[:_HALF]


def _layouts_agree(own: list[Content], group: dist.ProcessGroup | None) -> bool:
    """Whether ranks that hold the same parts of a layout hold the same contents."""
    records = []
    for layout in dict.fromkeys(each.layout for each in own):
        members = [each for each in own if each.layout == layout]
        records.append(_half(members[0].part) + _half(b"".join(each.digest for each in members)))
    return not any(_odd(of_ranks) for of_ranks in _gather(records, group))


def _record(own: list[Content], place: int) -> bytes:
    """Digests of name, part and content; zeros where this rank's list has ended."""
    if place >= len(own):
        return bytes(3 * _HALF)
    each = own[place]
    return _half(f"{each.layout}\0{each.name}") + _half(each.part) + _half(each.digest)


def _odd(records: Sequence[bytes]) -> Odd | None:
    """`odd_ones` of records `part, content`, by rank."""
    by_rank = dict(enumerate(records))
    return odd_ones(
        {rank: record[_HALF:] for rank, record in by_rank.items()},
        parts={rank: record[:_HALF] for rank, record in by_rank.items()},
    )


def _gather(records: list[bytes], group: dist.ProcessGroup | None) -> list[list[bytes]]:
    """All ranks' records, which are of one size, by record and then by rank within the group."""
    of_ranks = gather_bytes(b"".join(records), group)
    size = len(records[0])
    starts = range(0, len(records) * size, size)
    return [[every[at : at + size] for every in of_ranks] for at in starts]


def _refuse_difference(
    own: list[Content],
    place: int,
    of_ranks: list[bytes],
    group: dist.ProcessGroup | None,
    hint: str,
) -> None:
    """Raise PeerError if the contents at one place of the ranks' lists differ."""
    nobody = bytes(_HALF)
    odd = _odd([nobody + record[:_HALF] for record in of_ranks])
    if odd is not None:
        subject, shown = "'the compared fields'", _list_at(own, place)
    else:
        odd = _odd([record[_HALF:] for record in of_ranks])
        if odd is None:
            return
        subject, digest = own[place].name, own[place].digest.hex()[:8]
        shown = own[place].shown
        shown = f"{shown} (sha256 {digest})" if shown else f"the digest {digest}"
    ranks = odd.ranks
    if group is not None:
        ranks = [dist.get_global_rank(group, rank) for rank in ranks]
    who = f"rank {ranks[0]} disagrees" if len(ranks) == 1 else f"ranks {listed(ranks)} disagree"
    raise PeerError(
        f"{who} with the other {odd.others} about {subject}; rank {dist.get_rank()} has {shown}",
        ranks=ranks,
        hint=hint,
    )


def _list_at(own: list[Content], place: int) -> str:
    """This rank's names if these are few, else the one at a place."""
    names = ", ".join(n[1:-1] if n[0] == n[-1] == "'" else n for n in (c.name for c in own))
    if len(names) <= _SHOWN_CHARACTERS:
        return repr(names)
    return own[place].name if place < len(own) else f"{len(own)} of them"


def listed(ranks: Sequence[int]) -> str:
    """The first eight of these ranks, as text: a world may have thousands."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more
