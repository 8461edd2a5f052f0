"""A plan by PyTorch's own overlap scheduler, to compare with: a rival, not a search.

`torch._inductor.fx_passes.overlap_scheduling` walks a functional graph, keeps it near the order in
which it comes, starts collectives early where compute is left to hide them and defers waits. It
is given the times that the searches get.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from interlace.errors import InputError
from interlace.graphs.torch_private import inductor_schedule
from interlace.graphs.trace import StrandGraph
from interlace.graphs.wide_sums import ADD_WIDE
from interlace.ir.actions import strands_of
from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.phases import phase_graph
from interlace.ir.plan import PhasePlan, Plan
from interlace.runtime.traced_strands import BACKWARD, FORWARD, Strands
from interlace.schedules.finder import of_strands
from interlace.sim.lanes import simulate

aten = torch.ops.aten
_FUNCTIONAL = {
    aten.addmm_.default: aten.addmm.default,
    aten.add_.Tensor: aten.add.Tensor,
    ADD_WIDE: aten.addmm.dtype,
}
"""Additions to a gradient buffer, as the scheduler knows them: it takes no operator in place."""


def has_inductor_schedule() -> bool:
    """Whether torch has the overlap scheduler in the form that `inductor_schedule` calls."""
    return torch.__version__ >= "2.13"


def inductor_order(
    strands: Mapping[str, StrandGraph], order: Sequence[str], solo_ns: Mapping[str, int]
) -> tuple[str, ...]:
    """The scheduler's order of the operators `order` (`strand.name`), which it is handed in that
    order. Raises InputError where torch has no such scheduler."""
    if not has_inductor_schedule():
        raise InputError(
            f"mode inductor needs the overlap scheduler of torch 2.13 and newer, and this is torch "
            f"{torch.__version__}",
            hint="take inductor out of compare.modes",
        )
    builder = _Builder(strands)
    for name in order:
        builder.operator(name)
    module = builder.finish()
    ids = {node.name: name for name, node in builder.operators.items()}
    times = {node.name: solo_ns[name] / 1e6 for name, node in builder.operators.items()}
    nodes = inductor_schedule(module, lambda node: times.get(node.name))
    return tuple(ids[node.name] for node in nodes if node.name in ids)


class _Builder:
    """Copies strands into one functional graph with their traced collectives and waits."""

    def __init__(self, strands: Mapping[str, StrandGraph]) -> None:
        self.strands = strands
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.done: dict[fx.Node, fx.Node] = {}
        self.operators: dict[str, fx.Node] = {}
        self.nodes = {
            f"{strand}.{node.name}": (strand, node)
            for strand, traced in strands.items()
            for node in traced.graph.nodes
        }
        for strand, node in self.nodes.values():
            if node.op == "placeholder":
                self.done[node] = self.graph.placeholder(f"{strand}_{node.name}")
                self.done[node].meta = dict(node.meta)

    def operator(self, name: str) -> None:
        """Append an operator after the views and waits that it reads."""
        strand, node = self.nodes[name]
        self.operators[name] = self._copy(strand, node)

    def _copy(self, strand: str, node: fx.Node) -> fx.Node:
        if node in self.done:
            return self.done[node]
        for source in node.all_input_nodes:
            self._copy(strand, source)
        copy = self.graph.node_copy(node, self.done.__getitem__)
        if node.op == "get_attr":
            copy.target = f"{strand}_{node.target}"
            setattr(self.root, copy.target, getattr(self.strands[strand].module, str(node.target)))
        copy.target = _FUNCTIONAL.get(node.target, copy.target)  # type: ignore[arg-type]
        if node.target == ADD_WIDE:
            copy.kwargs = {}
        copy.meta = dict(node.meta)
        self.done[node] = copy
        return copy

    def finish(self) -> fx.GraphModule:
        """The graph. What nobody reads, as the new gradient sums, is an output like the strands'
        own, so that nothing is dropped."""
        for strand, traced in self.strands.items():
            for node in traced.outputs:
                self._copy(strand, node)
        outputs = {self.done[node] for traced in self.strands.values() for node in traced.outputs}
        kept = [node for node in self.graph.nodes if node in outputs or not node.users]
        self.graph.output(tuple(kept))
        return fx.GraphModule(self.root, self.graph)


def inductor_plan(strands: Strands, costs: CostTable) -> Plan:
    """The scheduler's order of each phase, from the same times as any search.

    It moves operators little, so of two strands it is given an order in which both strands progress
    alike. Raises InputError where torch has no such scheduler, and for a step that gathers weights
    or reduces gradients outside of micro-batches.
    """
    others = sorted(strands.graphs.keys() - {FORWARD, BACKWARD})
    if others:
        raise InputError(
            f"PyTorch's overlap scheduler is not given the strands {', '.join(others)} of a "
            "data-parallel step",
            hint="leave inductor out of compare.modes, or set parallel.zero to 3 and "
            "parallel.reduce to micro_batch",
        )
    traced = {name: strands.graphs[name] for name in (FORWARD, BACKWARD)}
    schedule = of_strands(2)
    phases = {}
    for phase in schedule.phases(strands.op_graphs):
        graph = phase_graph(phase, strands.op_graphs, 0)
        solo_ns = costs.of(graph)
        if len(strands_of(phase)) > 1:
            order = inductor_order(traced, alternating(graph, solo_ns), solo_ns)
        else:
            full = {f"{phase}.{name}": ns for name, ns in solo_ns.items()}
            found = inductor_order({phase: traced[phase]}, list(full), full)
            order = tuple(name.partition(".")[2] for name in found)
        timeline = simulate(
            graph, order, solo_ns, issue_ns=costs.issue_ns, contention=costs.contention
        )
        phases[phase] = PhasePlan(order, timeline.length_ns, timeline.exposed_ns())
    return Plan("inductor", strands.digest, costs.digest, schedule.name, phases)


def alternating(graph: OpGraph, solo_ns: dict[str, int]) -> tuple[str, ...]:
    """Both strands of `graph` in trace order, each operator where its strand has spent the same
    share of its time as the other."""
    totals: dict[str, int] = {}
    at: dict[str, int] = {}
    for name in graph.order:
        strand = name.partition(".")[0]
        at[name] = totals.get(strand, 0)
        totals[strand] = at[name] + solo_ns[name]

    def progress(name: str) -> float:
        return at[name] / max(1, totals[name.partition(".")[0]])

    return tuple(sorted(graph.order, key=progress))
