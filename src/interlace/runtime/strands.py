"""From a laid-out module to something that runs: trace, export, plan, lower.

`Strands` holds everything that is needed to plan and to run one chunk on this rank. It is built
once; executors for one and for two strands share its graphs and gradient buffers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from interlace.graphs.accumulate import accumulate_gradients
from interlace.graphs.export import export, output_storages
from interlace.graphs.trace import ChunkGraphs, StrandGraph, trace_chunk
from interlace.ir.graph import OpGraph, merge
from interlace.ir.plan import Plan, sequential
from interlace.runtime.executor import Batch, StrandExecutor


@dataclass(frozen=True)
class Strands:
    """A traced chunk: graphs to run and graphs to plan on."""

    module: nn.Module
    chunk: ChunkGraphs
    backward: StrandGraph
    """Backward with accumulation into buffers; has no outputs."""
    op_graphs: Mapping[str, OpGraph]
    """`forward`, `backward`, and `pair`, the two merged."""

    @property
    def digest(self) -> str:
        """Hash of the graphs; equal on all ranks that run the same program."""
        return self.op_graphs["pair"].digest

    @property
    def sequential(self) -> Plan:
        """One strand: the order in which the graphs were traced."""
        return sequential(self.op_graphs["forward"], self.op_graphs["backward"])

    def executor(self, plan: Plan, gradients: Mapping[str, Tensor]) -> StrandExecutor:
        """Something that runs steps as planned. Raises InputError for an invalid plan."""
        plan.validate(self.op_graphs["forward"], self.op_graphs["backward"], "plan")
        return StrandExecutor(
            self.module, self.chunk, self.backward, plan, self.op_graphs, gradients
        )


def build_strands(
    module: nn.Module,
    example: Batch,
    axis_of_group: Mapping[str, str],
    *,
    buffer_dtype: torch.dtype = torch.float32,
) -> Strands:
    """Trace `module(*example) -> loss`; gradients will be summed in `buffer_dtype`."""
    chunk = trace_chunk(module, example)
    backward = accumulate_gradients(chunk, buffer_dtype)
    axes = dict(axis_of_group)
    graphs = {
        "forward": export(chunk.forward, axes),
        "backward": export(backward, axes, output_storages(chunk.forward)),
    }
    graphs["pair"] = merge("pair", graphs)
    return Strands(module, chunk, backward, graphs)
