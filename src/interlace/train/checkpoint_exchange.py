"""Plain values between ranks, as JSON: what one rank tells another is never run."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.errors import RunError

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
