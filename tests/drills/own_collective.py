"""A collective in one file: broadcast, which Interlace has no call for."""

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.graphs.collectives import Pending, declare
from interlace.graphs.torch_private import process_group
from interlace.ir.graph import Kind


def broadcast(x: Tensor, source: int, group_name: str) -> Pending:
    """What rank `source` of the group holds, on all of them. The arguments are those of the traced
    operator."""
    output, group = x.clone(), process_group(group_name)
    work = dist.broadcast(output, group=group, group_src=source, async_op=True)
    assert work is not None  # async_op=True gives a work
    return Pending(output, work, group_name)


def declare_broadcast() -> None:
    """Say so, once in a process and before a step is compiled."""
    declare(torch.ops._c10d_functional.broadcast.default, broadcast, Kind.BROADCAST)
