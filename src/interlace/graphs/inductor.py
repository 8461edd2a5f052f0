"""The order that PyTorch's own overlap scheduler finds for strands: a rival, not a search.

`torch._inductor.fx_passes.overlap_scheduling` walks a functional graph, keeps it near the order in
which it comes, starts collectives early where compute is left to hide them and defers waits. It
is given the times that the searches get.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from interlace.errors import InputError
from interlace.graphs.torch_private import has_inductor_schedule, inductor_schedule
from interlace.graphs.trace import StrandGraph
from interlace.graphs.wide_sums import ADD_WIDE

aten = torch.ops.aten
_FUNCTIONAL = {
    aten.addmm_.default: aten.addmm.default,
    aten.add_.Tensor: aten.add.Tensor,
    ADD_WIDE: aten.addmm.dtype,
}
"""Additions to a gradient buffer, as the scheduler knows them: it takes no operator in place."""


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
