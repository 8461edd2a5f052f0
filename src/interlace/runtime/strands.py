"""From a laid-out module to something that runs: trace, export, plan, lower.

`Strands` holds everything that is needed to plan and to run one chunk on this rank. It is built
once; executors for one and for two strands share its graphs and gradient buffers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from interlace.cost.profile import measure
from interlace.graphs.accumulate import accumulate_gradients
from interlace.graphs.export import export
from interlace.graphs.lower import lower
from interlace.graphs.trace import ChunkGraphs, StrandGraph, trace_chunk
from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph, merge
from interlace.ir.plan import Plan, check
from interlace.ir.timeline import Timeline
from interlace.runtime.executor import Batch, StrandExecutor, local
from interlace.runtime.recorder import Recorder, clock_for
from interlace.search.planner import plan_phase
from interlace.search.problem import Problem


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

    def sequential_orders(self) -> dict[str, tuple[str, ...]]:
        """The order in which the graphs were traced."""
        return {name: self.op_graphs[name].order for name in ("forward", "backward")}

    def executor(
        self, orders: Mapping[str, tuple[str, ...]], gradients: Mapping[str, Tensor]
    ) -> StrandExecutor:
        """Something that runs steps in these orders; validates them first."""
        for phase, order in orders.items():
            check(order, self.op_graphs[phase], f"plan, phase {phase!r}")
        return StrandExecutor(
            self.module, self.chunk, self.backward, orders, self.op_graphs, gradients
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
    graphs = {
        "forward": export(chunk.forward, dict(axis_of_group)),
        "backward": export(backward, dict(axis_of_group)),
    }
    graphs["pair"] = merge("pair", graphs)
    return Strands(module, chunk, backward, graphs)


def make_plan(
    strands_graphs: Mapping[str, OpGraph], costs: CostTable, search: str, *, memory_bytes: int = 0
) -> Plan:
    """Search the order of each phase. Deterministic: equal graphs and costs, equal plan.

    Raises InputError if a phase needs more than `memory_bytes` (0: no bound)."""
    phases = {}
    for name, graph in strands_graphs.items():
        problem = Problem(graph, costs.of(graph), costs.issue_ns, memory_bytes)
        phases[name] = plan_phase(problem, search)
    order = ("forward", "pair", "backward")
    return Plan(
        search, strands_graphs["pair"].digest, costs.digest, {name: phases[name] for name in order}
    )


def profile_strands(
    strands: Strands, batch: Batch, device_type: str, *, repeats: int, machine: str
) -> CostTable:
    """Measure this chunk's operators and collectives alone on real data. Collective."""
    scratch = {
        name: torch.zeros_like(parameter.detach(), dtype=torch.float32)
        for name, parameter in strands.module.named_parameters(remove_duplicate=False)
        if name in strands.chunk.parameters
    }
    executor = strands.executor(
        strands.sequential_orders(), {name: local(buffer) for name, buffer in scratch.items()}
    )
    for phase in executor.lowered:
        graph = strands.backward if phase == "backward" else strands.chunk.forward
        executor.lowered[phase] = lower(
            {phase: graph}, strands.op_graphs[phase].order, late_waits=False
        )
    return measure(
        partial(_run_once, strands, executor, batch, device_type),
        {name: strands.op_graphs[name] for name in ("forward", "backward")},
        repeats=repeats,
        machine=machine,
        graph_digest=strands.digest,
    )


def _run_once(
    strands: Strands, executor: StrandExecutor, batch: Batch, device_type: str
) -> Timeline:
    recorder = Recorder(strands.op_graphs, clock_for(device_type))
    executor.step([batch], recorder)
    return recorder.timeline("profile", 0)
