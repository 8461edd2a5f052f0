"""What a rank needs beside the values of its graphs, and how much a plan may add."""

from collections.abc import Collection

from torch import nn

from interlace.config import RunConfig
from interlace.parallel.data import DataLayout
from interlace.parallel.local_parts import local
from interlace.search.problem import MemoryLimits

MIB = 2**20
"""Bytes of a MiB."""


def constant_bytes(
    config: RunConfig,
    module: nn.Module,
    data: DataLayout | None,
    held: Collection[str] | None = None,
) -> dict[str, int]:
    """What a rank holds from the first step to the last, by name, where it runs strands. `held`
    names the parameters of its stage of a pipeline."""
    named = module.named_parameters()
    parts = [local(each) for name, each in named if held is None or name in held]
    item = parts[0].element_size() if parts else 0  # a stage may have none
    elements = sum(part.numel() for part in parts)
    buckets = data.buckets if data is not None else ()
    sharded = sum(bucket.elements for bucket in buckets if bucket.sharded)
    own = sharded // (data.shard.size if data is not None else 1)
    owned = elements - sharded + own
    separate = config.train.dtype != "float32"
    computing = own if data is not None and data.gathers_each else sharded
    summed = 0 if data is not None and data.reduce_each else sharded
    held = {
        "weights": (elements - sharded + computing) * item,
        "weight shards": own * item if separate and data is not None and data.zero == 1 else 0,
        "float32 masters": 4 * owned if separate else 4 * (own if computing != own else 0),
        "gradient sums": 4 * (elements - sharded + summed),
        "gradient shards": 4 * own,
        "optimizer state": 8 * owned,
        "buffers": sum(b.numel() * b.element_size() for b in module.buffers()),
    }
    return {name: size for name, size in held.items() if size}


def memory_limits(
    config: RunConfig,
    module: nn.Module,
    data: DataLayout | None,
    held: Collection[str] | None = None,
) -> MemoryLimits:
    """The limits that `config.plan` sets for this rank, which holds `held` of `module`'s
    parameters, or all of them."""
    return MemoryLimits(
        bound_bytes=int(config.plan.memory_mib * MIB),
        constant_bytes=sum(constant_bytes(config, module, data, held).values()),
        extra_share=config.plan.extra_memory,
        extra_bytes=int(config.plan.extra_memory_mib * MIB),
    )
