"""The device of a rank of `train`, and what must be settled before its process group exists."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils import deterministic as torch_deterministic

from interlace.errors import InputError
from interlace.graphs.torch_private import set_group_timeout
from interlace.ranks.determinism import (
    CUBLAS_DETERMINISTIC,
    CUBLAS_VARIABLE,
    NCCL_DETERMINISTIC,
    NCCL_VARIABLE,
    nondeterminism,
    uses_nccl,
)
from interlace.ranks.small_collectives import gather_bytes

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends of a process group, by device type. On CUDA the small agreements between ranks stay on
the CPU, where they need no GPU to be set up and make no rank wait for its own."""
NCCL_TIMEOUT = timedelta(minutes=10)
"""Time limit of a collective: torch's own for a group of NCCL alone. A group that has gloo too
would wait for 30 minutes."""
NCCL_HOST_VARIABLE = "NCCL_HOSTID"
"""What NCCL takes for the name of a rank's host, where it is set. It connects ranks of two hosts by
sockets, and does not ask whether they have the same GPU."""
_CLAIM_BYTES = 64
"""Bytes to which a claim is padded for gathering; a choice, longer than a UUID in text."""


def device_type() -> str:
    """`cuda` where there is a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def claim_device(*, deterministic: bool) -> torch.device:
    """This rank's device, made the current one, with deterministic kernels if that is asked for.
    Call before the first process group: NCCL takes the current device, and reads which algorithms
    it may use when a group is made."""
    if deterministic:
        _set_determinism()
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def local_device() -> torch.device:
    """The GPU of this rank's number on its host, or the CPU. Where a launcher shows each process
    one GPU only, that one; `check_device` refuses two ranks of one host on one GPU."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", _local_rank() % torch.cuda.device_count())


def _set_determinism() -> None:
    os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_DETERMINISTIC[0])
    if device_type() == "cuda":
        os.environ.setdefault(NCCL_VARIABLE, NCCL_DETERMINISTIC)
    torch.use_deterministic_algorithms(True)
    # Filling every fresh tensor with NaN would cost a write of all activations.
    torch_deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_device(device: torch.device, *, deterministic: bool) -> None:
    """Refuse a device that this rank does not have for itself, and settings of the environment
    against which a run cannot be deterministic. Collective; raises InputError."""
    if device.type == "cpu":
        return
    count, index = torch.cuda.device_count(), _local_rank()
    if 1 < count <= index:
        raise InputError(
            f"local rank {index} has no GPU: this host has {count}",
            hint="start at most one rank per GPU",
        )
    if uses_nccl():
        _refuse_shared(str(torch.cuda.get_device_properties(device).uuid))
    reasons = nondeterminism(device) if deterministic else ()
    if reasons:
        raise InputError(
            f"train.deterministic is set, but {reasons[0]}",
            hint="unset that variable, or set train.deterministic to false",
        )


def limit_waits(groups: Iterable[dist.ProcessGroup]) -> None:
    """Collectives of these groups fail after `NCCL_TIMEOUT`, where they go through NCCL."""
    for group in groups if uses_nccl() else ():
        set_group_timeout(NCCL_TIMEOUT, group)


def _refuse_shared(uuid: str) -> None:
    """Raises InputError where NCCL would: two ranks have one GPU and are of one host."""
    host = hashlib.sha256(os.environ.get(NCCL_HOST_VARIABLE, "").encode()).hexdigest()
    ranks_of: dict[bytes, list[int]] = defaultdict(list)
    claim = f"{uuid} {host}".encode()[:_CLAIM_BYTES]
    for rank, gathered in enumerate(gather_bytes(claim.ljust(_CLAIM_BYTES), None)):
        ranks_of[gathered].append(rank)
    for gathered, ranks in ranks_of.items():
        if len(ranks) > 1:
            raise InputError(
                f"ranks {ranks[0]} and {ranks[1]} use the same GPU, {gathered.split()[0].decode()}",
                hint="start at most one rank per GPU, and set LOCAL_RANK to a rank's number on "
                "its host, as torchrun does",
            )


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
