"""All ranks prove, before the first step, that they are about to run the same thing.

A disagreement that slips through is not noticed by gloo: ranks that differ in dtype, order or
reduce operation compute garbage in silence.
"""

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist

import interlace
from interlace.errors import PeerError

_DIGEST_BYTES = 32
_SHOWN_CHARACTERS = 200
_FLAG_PREFIXES = ("TORCH_", "NCCL_", "GLOO_")
# Different on every host, or without an effect on what is computed.
_LOCAL_WORDS = (
    "IFNAME", "ADDR", "HCA", "HOSTID", "COMM_ID", "FILE", "DIR", "PATH", "HOME", "DEBUG", "LOGS",
    "PORT", "CPP_LOG", "SHOW_CPP",
)  # fmt: skip


def check_agreement(fields: Mapping[str, str], *, group: dist.ProcessGroup | None = None) -> None:
    """Compares named texts ("configuration", "plan", "graph") across the ranks of `group`.

    Collective, on the default group if none is given; a world of one agrees with itself. Only
    sha256 digests travel, 32 bytes per field and rank. Raises PeerError, on all ranks alike,
    naming the first field that differs and the ranks in the minority.
    """
    if not dist.is_initialized():
        return
    names = list(fields)
    name_digests = _gather([_digest("\n".join(names))], group)
    _refuse_difference("the compared fields", ", ".join(names), name_digests[0], group)
    if not names:
        return
    digests = _gather([_digest(text) for text in fields.values()], group)
    for name, of_ranks in zip(names, digests, strict=True):
        _refuse_difference(name, fields[name], of_ranks, group)


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


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a small tensor must live for a collective of `group`: the CPU if it can."""
    devices = {part.partition(":")[0] for part in dist.get_backend_config(group).split(",")}
    if "cpu" in devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _gather(digests: list[bytes], group: dist.ProcessGroup | None) -> list[list[bytes]]:
    """All ranks' digests, by field and then by rank within the group."""
    device = collective_device(group)
    own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    of_ranks = [bytes(tensor.tolist()) for tensor in gathered]
    starts = range(0, len(digests) * _DIGEST_BYTES, _DIGEST_BYTES)
    return [[every[at : at + _DIGEST_BYTES] for every in of_ranks] for at in starts]


def _refuse_difference(
    name: str, text: str, digests: list[bytes], group: dist.ProcessGroup | None
) -> None:
    counts = Counter(digests)  # keeps the order of first appearance: a tie goes to the lowest rank
    if len(counts) == 1:
        return
    usual, of_usual = counts.most_common(1)[0]
    odd = [rank for rank, digest in enumerate(digests) if digest != usual]
    if group is not None:
        odd = [dist.get_global_rank(group, rank) for rank in odd]
    who = f"rank {odd[0]} disagrees" if len(odd) == 1 else f"ranks {_listed(odd)} disagree"
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{len(text)} characters"
    raise PeerError(
        f"{who} with the other {of_usual} about {name!r}; "
        f"rank {dist.get_rank()} has {shown!r} (sha256 {_digest(text).hex()[:8]})",
        ranks=odd,
        hint="start all ranks with the same files, versions and environment",
    )


def _listed(ranks: list[int]) -> str:
    """A world may have thousands: the first eight."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more
