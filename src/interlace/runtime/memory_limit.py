"""What a rank needs beside the values of its graphs, and how much a plan may add."""

from collections.abc import Collection, Mapping
from math import prod

from torch import nn

from interlace.config import Dtype, ParallelConfig, PlanConfig
from interlace.parallel.data import DataLayout, shards_of, split_weights
from interlace.parallel.local_parts import stored
from interlace.search.problem import MemoryLimits

MIB = 2**20
"""Bytes of a MiB."""


def constant_bytes(
    parallel: ParallelConfig,
    dtype: Dtype,
    module: nn.Module,
    data: DataLayout | None,
    held: Collection[str] | None = None,
) -> dict[str, int]:
    """What a rank holds from the first step to the last, by name, where it runs strands and graphs
    compute in `dtype`. `held` names the parameters of its stage of a pipeline."""
    separate = dtype != "float32"
    if held is not None and shards_of(parallel) > 1:
        return _of_cut_stage(parallel, module, held, masters_are_apart=separate)
    named = module.named_parameters()
    parts = [stored(each) for name, each in named if held is None or name in held]
    item = parts[0].element_size() if parts else 0  # a stage may have none
    elements = sum(part.numel() for part in parts)
    buckets = data.buckets if data is not None else ()
    cut = [bucket for bucket in buckets if bucket.sharded]
    sharded = sum(bucket.elements for bucket in cut)
    own = sum(bucket.elements // bucket.shard.size for bucket in cut)
    owned = elements - sharded + own
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


def _of_cut_stage(
    parallel: ParallelConfig, module: nn.Module, held: Collection[str], *, masters_are_apart: bool
) -> dict[str, int]:
    """The same of a stage whose ranks share its masters (`parallel.stage_shards`)."""
    weights = [e for e in split_weights(module, shards_of(parallel)) if e.name in held]
    elements = sum(each.elements for each in weights)
    parts = {each: prod(each.part) for each in weights}
    cut = [each for each in weights if each.dim is not None]
    item = next(module.parameters()).element_size()
    separate = weights if masters_are_apart else cut
    whole = sum(each.elements for each in (cut if parallel.zero == 1 else ()))
    whole += sum(each.elements for each in weights if each.dim is None)
    shards = sum(parts[each] for each in cut) if parallel.zero == 3 else 0
    found = {
        "weights": whole * item,
        "weight shards": shards * item,
        "float32 masters": 4 * sum(parts[each] for each in separate),
        "gradient sums": 4 * elements,
        # Parts of gradients are views where the first dimension is cut.
        "gradient shards": 4 * sum(parts[each] for each in cut if each.dim),
        "optimizer state": 8 * sum(parts.values()),
        "buffers": sum(b.numel() * b.element_size() for b in module.buffers()),
    }
    return {name: size for name, size in found.items() if size}


def memory_limits(plan: PlanConfig, constant: Mapping[str, int]) -> MemoryLimits:
    """The limits that `[plan]` sets for a rank that has `constant_bytes` beside its values."""
    return MemoryLimits(
        bound_bytes=int(plan.memory_mib * MIB),
        constant_bytes=sum(constant.values()),
        extra_share=plan.extra_memory,
        extra_bytes=int(plan.extra_memory_mib * MIB),
    )
