"""Ranks that measured different times agree on one number each."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.errors import RunError


def is_first_rank() -> bool:
    """Whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def agree(mine: Mapping[str, float], *, smallest: Collection[str] = ()) -> dict[str, int]:
    """Per name the largest value of any rank, of the names in `smallest` the smallest one.

    Collective on the default group; every rank must have the same names.
    """
    names = sorted(mine)
    if _alone():
        return {name: round(mine[name]) for name in names}
    signs = torch.tensor([-1 if name in smallest else 1 for name in names], dtype=torch.int64)
    values = torch.tensor([round(mine[name]) for name in names], dtype=torch.int64) * signs
    values = values.to(collective_device())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(names, (values.cpu() * signs).tolist(), strict=True))


def average(mine: Mapping[str, float]) -> dict[str, int]:
    """Per name the mean over ranks. Collective, as `agree`."""
    names = sorted(mine)
    values = torch.tensor([mine[name] for name in names], dtype=torch.float64)
    if not _alone():
        values = values.to(collective_device())
        dist.all_reduce(values)
        values = values.cpu() / dist.get_world_size()
    return {name: round(value) for name, value in zip(names, values.tolist(), strict=True)}


def broadcast_text(text: str) -> str:
    """The first rank's text, on all ranks: bytes of announced length. Collective."""
    if _alone():
        return text
    content = bytearray(text.encode())
    length = torch.tensor([len(content)], dtype=torch.int64, device=collective_device())
    dist.broadcast(length, src=0)
    if not int(length):
        return ""
    payload = torch.zeros(int(length), dtype=torch.uint8)
    if is_first_rank():
        payload = torch.frombuffer(content, dtype=torch.uint8)
    payload = payload.to(collective_device())
    dist.broadcast(payload, src=0)
    return payload.cpu().numpy().tobytes().decode()


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where a small tensor must live for a collective of `group`: the CPU if it can."""
    devices = {part.partition(":")[0] for part in dist.get_backend_config(group).split(",")}
    if "cpu" in devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


# Plans of a model with 100,000 tensors are 20 MB.
MOST_BYTES = 1 << 28


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks of a gloo group, by rank. Collective."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [int(each) for each in _gather(torch.tensor([len(own)]), group)]
    if max(lengths) > MOST_BYTES:
        raise RunError(f"a rank sends {max(lengths)} bytes, more than {MOST_BYTES}")
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = own
    texts = zip(_gather(padded, group), lengths, strict=True)
    return [json.loads(bytes(text[:length].numpy())) for text, length in texts]


def _gather(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return gathered
