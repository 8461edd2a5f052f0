"""What a rank needs beside the values of its graphs, and how much a plan may add."""

from torch import nn

from interlace.config import RunConfig
from interlace.runtime.executor import local
from interlace.search.limits import MemoryLimits

MIB = 2**20


def constant_bytes(config: RunConfig, module: nn.Module) -> dict[str, int]:
    """What a rank holds from the first step to the last, by name."""
    parts = [local(parameter) for parameter in module.parameters()]
    elements = sum(part.numel() for part in parts)
    separate = config.train.dtype != "float32"
    return {
        "weights": sum(part.numel() * part.element_size() for part in parts),
        "float32 masters": 4 * elements if separate else 0,
        "gradient sums": 4 * elements,
        "optimizer state": 8 * elements,
        "buffers": sum(b.numel() * b.element_size() for b in module.buffers()),
    }


def memory_limits(config: RunConfig, module: nn.Module) -> MemoryLimits:
    """The limits that `config.plan` sets for the chunk `module` of this rank."""
    return MemoryLimits(
        bound_bytes=int(config.plan.memory_mib * MIB),
        constant_bytes=sum(constant_bytes(config, module).values()),
        extra_share=config.plan.extra_memory,
        extra_bytes=int(config.plan.extra_memory_mib * MIB),
    )
