"""Small values between ranks: the largest, the mean, that of the first rank, or those of all."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from interlace.errors import RunError


def is_first_rank(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this is rank 0 of a group, by default of the job, or the only process."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


def largest(
    mine: Mapping[str, float],
    *,
    smallest: Collection[str] = (),
    group: dist.ProcessGroup | None = None,
) -> dict[str, int]:
    """Per name the largest value of any rank; for the names in `smallest` the smallest one.

    Collective, on the default group if none is given; every rank must have the same names.
    """
    names = sorted(mine)
    if alone(group):
        return {name: round(mine[name]) for name in names}
    signs = torch.tensor([-1 if name in smallest else 1 for name in names], dtype=torch.int64)
    values = torch.tensor([round(mine[name]) for name in names], dtype=torch.int64) * signs
    values = values.to(collective_device(group))
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(names, (values.cpu() * signs).tolist(), strict=True))


def mean(mine: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """Per name the mean over ranks. Collective, on the default group if none is given."""
    names = sorted(mine)
    values = torch.tensor([mine[name] for name in names], dtype=torch.float64)
    if not alone(group):
        values = values.to(collective_device(group))
        dist.all_reduce(values, group=group)
        values = values.cpu() / dist.get_world_size(group)
    return {name: round(value) for name, value in zip(names, values.tolist(), strict=True)}


def broadcast_text(text: str, group: dist.ProcessGroup | None = None) -> str:
    """The first rank's text, on all ranks of a group: bytes of announced length. Collective."""
    if alone(group):
        return text
    content = bytearray(text.encode())
    length = torch.tensor([len(content)], dtype=torch.int64, device=collective_device(group))
    dist.broadcast(length, group=group, group_src=0)
    if not int(length):
        return ""
    payload = torch.zeros(int(length), dtype=torch.uint8)
    if is_first_rank(group):
        payload = torch.frombuffer(content, dtype=torch.uint8)
    payload = payload.to(collective_device(group))
    dist.broadcast(payload, group=group, group_src=0)
    return payload.cpu().numpy().tobytes().decode()


def alone(group: dist.ProcessGroup | None = None) -> bool:
    """Whether there is no other rank to exchange anything with."""
    return not dist.is_initialized() or dist.get_world_size(group) == 1


def collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where a small tensor must live for a collective of `group`: the CPU if it can."""
    devices = {part.partition(":")[0] for part in dist.get_backend_config(group).split(",")}
    if "cpu" in devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


MOST_BYTES = 1 << 28
"""Most bytes that a rank may send as JSON; a choice, far above the 20 MB of plans of a model with
100,000 tensors."""


def gather_bytes(own: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """The bytes of all ranks, of which each has equally many, by rank within the group. Collective.
    Nothing that a rank gets from another is run as code."""
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(collective_device(group))
    gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, sent, group=group)
    return [tensor.cpu().numpy().tobytes() for tensor in gathered]


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The plain values of all ranks, by rank within the group. Collective."""
    own = json.dumps(value).encode()
    lengths = [int.from_bytes(each) for each in gather_bytes(len(own).to_bytes(8), group)]
    if max(lengths) > MOST_BYTES:
        raise RunError(f"a rank sends {max(lengths)} bytes, more than {MOST_BYTES}")
    texts = zip(gather_bytes(own.ljust(max(lengths)), group), lengths, strict=True)
    return [json.loads(text[:length]) for text, length in texts]
