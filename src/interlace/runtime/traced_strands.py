"""From a laid-out module to something that runs: trace, share over data-parallel ranks, export.

`Strands` holds everything that is needed to plan and to run the model on this rank. It is built
once; executors for one and for two strands share its graphs and gradient buffers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Placement

from interlace.decompose.listing import Listing, with_others
from interlace.decompose.rewrite.apply import Decompose, decompose_chunk
from interlace.errors import InputError
from interlace.garbage import no_collections
from interlace.graphs.accumulate import accumulate_gradients
from interlace.graphs.collectives import is_collective
from interlace.graphs.data_parallel import gather_each, gather_once, reduce_each, reduce_once
from interlace.graphs.dropout import fix_dropout, takes_seeds
from interlace.graphs.fsdp_exchange import exchange, keep_wide
from interlace.graphs.gradient_layouts import check_parameters, lay_out_gradients
from interlace.graphs.group_axes import axes_of_groups
from interlace.graphs.joint_backwards import split_joint_backwards
from interlace.graphs.op_graphs import export, output_storages
from interlace.graphs.parts import LOSS, RESULT, SAVED, GraphPart
from interlace.graphs.python_reads import Reads
from interlace.graphs.recompute import KEEP_ALL, RecomputePolicy, with_recompute
from interlace.graphs.repeat import trace_repeated
from interlace.graphs.strides import same_strides, without_overlap
from interlace.graphs.trace import Binding, ChunkGraphs, StrandGraph, results_of, trace_chunk
from interlace.ir.actions import Direction, Share, Strand, strand
from interlace.ir.graph import OpGraph
from interlace.ir.phases import whole_graph
from interlace.ir.plan import Plan
from interlace.parallel.data import DataLayout
from interlace.parallel.fsdp_groups import WeightGroups
from interlace.parallel.local_parts import local, stored
from interlace.runtime.executor import Batch, StepExecutor
from interlace.runtime.handovers import Handovers
from interlace.runtime.pipeline_executor import PipelineExecutor
from interlace.runtime.stage_link import StageLink
from interlace.schedules.finder import Schedule, sequential, validate
from interlace.schedules.stage import StageSchedule

FORWARD, BACKWARD = (Strand(direction).graph for direction in Direction)
"""Names of the two graphs that every module gives."""
GATHER, REDUCE = (Strand(direction, share=Share.ONCE).graph for direction in Direction)
"""Names of the graphs that are made here (`ir.actions`)."""


@dataclass(frozen=True)
class Strands:
    """A traced model: graphs to run and graphs to plan on."""

    module: nn.Module
    graphs: Mapping[str, StrandGraph]
    """As traced: `forward`; `backward` with accumulation into buffers, which has no outputs;
    `gather` and `reduce` if data-parallel ranks exchange something once a step."""
    parts: Mapping[str, GraphPart]
    """What each strand runs: a whole graph, or one chunk of it. Inputs and outputs have names."""
    op_graphs: Mapping[str, OpGraph]
    """The same parts as a planner sees them."""
    saved: tuple[str, ...]
    """Names of the values that a forward keeps for its backward."""
    parameters: tuple[str, ...]
    """Names of the parameters that get a gradient."""
    placements: Mapping[str, tuple[Placement, ...] | None]
    """Layout of each parameter's gradient over tensor-parallel ranks, None for plain tensors."""
    data: DataLayout | None
    axes: Mapping[str, str]
    """The mesh axis of each process group, by name."""
    not_repeated: str = ""
    """Why every block was traced though one of each kind was to be enough."""
    listing: Listing | None = None
    """What was decomposed, if that was asked for."""
    reads: Reads | None = None
    """What the forward read beside parameters and buffers, if that was asked for."""
    uncut: "Strands | None" = None
    """The same before it was cut into chunks, if it was."""
    handovers: Handovers | None = None
    """What chunks hand to each other, if there are several."""
    groups: WeightGroups | None = None
    """Weights that are under `fully_shard`."""

    @property
    def measured(self) -> "Strands":
        """What times are measured on, which go by the keys of operators: the graphs as traced."""
        return self.uncut or self

    @property
    def held(self) -> frozenset[str] | None:
        """Names of the parameters of this rank's stage of a pipeline; None if it has all."""
        if self.handovers is None or self.handovers.is_alone:
            return None
        return self.handovers.held

    @property
    def held_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that get a gradient and that this rank holds: of a pipeline,
        those of its stage."""
        held = self.held
        return tuple(name for name in self.parameters if held is None or name in held)

    @cached_property
    def pair(self) -> OpGraph:
        """All strands in one graph."""
        return whole_graph(self.op_graphs)

    @property
    def digest(self) -> str:
        """Hash of the graphs; equal on all ranks that run the same program."""
        return self.pair.digest

    @property
    def sequential(self) -> Plan:
        """One strand: the order in which the graphs were traced."""
        return sequential(self.op_graphs)

    @property
    def data_ranks(self) -> float:
        """By which sums of gradients over ranks are divided: their number, for a mean."""
        if self.groups is not None:
            return self.groups.divisor
        return 1 if self.data is None else self.data.ranks

    def buffers(self) -> dict[tuple[str, str], Tensor]:
        """The module's buffers as they are now, under each of their names, by (role, target)."""
        every_name = self.module.named_buffers(remove_duplicate=False)
        return {("buffer", name): local(buffer) for name, buffer in every_name}

    @property
    def loss(self) -> fx.Node:
        """The node of the loss, in the one part that gives it."""
        return next(
            node
            for part in self.parts.values()
            for node, name in zip(part.outputs, part.names, strict=True)
            if name == LOSS
        )

    @property
    def takes_seeds(self) -> bool:
        """Whether a forward takes seeds of dropout behind its batch."""
        return takes_seeds(self.graphs[FORWARD])

    @property
    def forward_lanes(self) -> set[str]:
        """The mesh axes over which forwards communicate, but for weights of `fully_shard`."""
        sharing = () if self.groups is None else self.groups.axes
        return {
            op.lane
            for name, graph in self.op_graphs.items()
            if strand(name) == Strand(Direction.FORWARD, strand(name).chunk)
            for op in graph.collectives
        } - {self.axes[axis.group] for axis in sharing if axis.size > 1}

    def executor(
        self,
        plan: Plan,
        constants: Mapping[tuple[str, str], Tensor],
        schedule: Schedule | None = None,
        link: StageLink | None = None,
    ) -> StepExecutor:
        """Something that runs steps as planned. `constants` holds what the graphs' inputs of roles
        `parameter`, `gradient`, `shard` and `shard_gradient` stand for, by (role, target);
        `schedule` is looked up by the plan's name if it is not given. `link` leads to the other
        ranks of a pipeline. Raises InputError for an invalid plan."""
        validate(plan, self.op_graphs, "plan", schedule)
        values = checked(self.graphs, {**self.buffers(), **constants})
        if link is not None:
            assert isinstance(schedule, StageSchedule)
            assert self.handovers is not None
            return PipelineExecutor(
                self.parts, plan, self.op_graphs, values, schedule=schedule,
                handovers=self.handovers, link=link, loss=self.measured.loss.meta["val"],
            )  # fmt: skip
        return StepExecutor(
            self.parts,
            plan,
            self.op_graphs,
            values,
            schedule=schedule,
            data_ranks=self.data_ranks,
        )


def checked(
    graphs: Mapping[str, StrandGraph], constants: Mapping[tuple[str, str], Tensor]
) -> Mapping[tuple[str, str], Tensor]:
    """`constants`, of which those that the graphs read have the shapes and strides that the graphs
    were made for. Raises InputError: a sum would spread a smaller gradient over a buffer."""
    for graph in graphs.values():
        for node in graph.graph.find_nodes(op="placeholder"):
            binding, made_for = graph.bindings[node.name], node.meta.get("val")
            given = constants.get((binding.role, binding.target))
            if given is None or not isinstance(made_for, Tensor):
                continue
            same = given.shape == made_for.shape
            if not same or not same_strides(given.shape, given.stride(), made_for.stride()):
                raise InputError(
                    f"the {binding.role.replace('_', ' ')} of {binding.target!r} is "
                    f"{list(given.shape)} with strides {list(given.stride())}, and the graph "
                    f"{graph.name!r} is made for {list(made_for.shape)} with strides "
                    f"{list(made_for.stride())}",
                    hint="trace again after changing a parameter's layout; a buffer of gradients "
                    "is torch.zeros_like of the parameter's local part",
                )
    return constants


@no_collections()
def build_strands(
    module: nn.Module,
    example: Batch,
    axis_of_group: Mapping[str, str],
    *,
    data: DataLayout | None = None,
    buffer_dtype: torch.dtype = torch.float32,
    recompute: RecomputePolicy = KEEP_ALL,
    repeat: bool = False,
    copies: bool = False,
    decompose: Decompose | None = None,
    wide_sums: Collection[torch.dtype] = (),
    fused_sums: bool = True,
    watch: bool = False,
    groups: WeightGroups | None = None,
) -> Strands:
    """Trace `module(*example) -> loss`; gradients will be summed in `buffer_dtype`, and over the
    data-parallel ranks of `data`. A chunk with dropout takes seeds behind its batch.

    `repeat` traces a few blocks and copies the others (`graphs.repeat`): without `watch` for models
    whose code treats blocks of one kind alike, with it for any; with `copies` for blocks that were
    made as copies. `decompose` cuts collectives into sends under partial matmuls.
    Matmuls of the types in `wide_sums` are added to float32 buffers unrounded (`graphs.wide_sums`);
    without `fused_sums` no matmul adds to a buffer itself, as in autograd.
    With `watch` strands know what the forward read of Python.
    `groups` are weights under `fully_shard`, which `module` now has whole and without memory.
    """
    check_parameters(module)
    example = tuple(without_overlap(tensor) for tensor in example)
    if repeat:
        chunk, _, reason = trace_repeated(module, example, watch=watch, copies=copies)
    else:
        chunk, reason = trace_chunk(module, example, watch=watch), ""
    reads, wanted = chunk.reads, chunk.results
    if groups is not None:
        keep_wide(chunk, groups.kept_wide)
    chunk = lay_out_gradients(chunk, module, {} if groups is None else groups.early_dtypes)
    traced = (chunk.forward.graph, chunk.backward.graph)
    cut_over = [axis.group for axis in groups.axes if axis.size > 1] if groups else ()
    axis_of_group = axes_of_groups(traced, axis_of_group, cut_over)
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= module.named_buffers(remove_duplicate=False)
    chunk = fix_dropout(chunk, batch_inputs=len(example), tensors=tensors)
    chunk = with_recompute(chunk, recompute)
    split_joint_backwards(chunk)
    listing = None
    if decompose is not None:
        chunk, listing = decompose_chunk(chunk, axis_of_group, decompose)
    before = _collectives({FORWARD: chunk.forward, BACKWARD: chunk.backward})
    strands = share(
        module, chunk, axis_of_group, data, buffer_dtype, wide_sums, fused_sums=fused_sums,
        groups=groups,
    )  # fmt: skip
    _check_results(strands, wanted)
    if listing is not None:
        why = "data-parallel ranks exchange whole buckets of weights"
        listing = with_others(listing, strands.graphs, before, why)
    return replace(strands, not_repeated=reason, listing=listing, reads=reads)


def _check_results(strands: Strands, wanted: int) -> None:
    """Raise InputError unless the forward still gives all results that the trace saw."""
    found = results_of(strands.graphs[FORWARD])
    if sorted(found) != list(range(wanted)):
        missing = min(set(range(wanted)) - set(found))
        raise InputError(
            f"loss_fn gives {wanted} tensors beside the loss, and number {missing} (counted from "
            "0) is made by an operator that was cut into slices",
            hint='return what is computed from it, or set overlap.decompose to "off"',
        )


def _collectives(graphs: Mapping[str, StrandGraph]) -> set[str]:
    return {
        f"{strand}.{node.name}"
        for strand, graph in graphs.items()
        for node in graph.graph.nodes
        if is_collective(node)
    }


def share(
    module: nn.Module,
    chunk: ChunkGraphs,
    axis_of_group: Mapping[str, str],
    data: DataLayout | None,
    buffer_dtype: torch.dtype,
    wide_sums: Collection[torch.dtype] = (),
    *,
    fused_sums: bool = True,
    groups: WeightGroups | None = None,
) -> Strands:
    """The strands of a traced chunk, whose graphs are changed."""
    done: frozenset[str] = frozenset()
    if data is not None and data.reduce_each:
        done = reduce_each(chunk, data, buffer_dtype)
    if groups is not None:
        chunk, done = exchange(chunk, groups, buffer_dtype)
    own = {name: stored(p) for name, p in module.named_parameters(remove_duplicate=False)}
    graphs = {
        FORWARD: chunk.forward,
        BACKWARD: accumulate_gradients(
            chunk, buffer_dtype, parameters=own, done=done, wide=wide_sums, fused=fused_sums
        ),
    }
    if data is not None:
        if data.gathers_each:
            graphs |= {name: gather_each(graphs[name], data) for name in (FORWARD, BACKWARD)}
        elif any(bucket.sharded for bucket in data.buckets):
            graphs[GATHER] = gather_once(graphs[FORWARD], data)
        reduce = reduce_once(graphs[BACKWARD], data, buffer_dtype)
        if reduce.bindings:
            graphs[REDUCE] = reduce
    axes = dict(axis_of_group)
    outputs = ("loss", *chunk.saved)
    storages = {BACKWARD: output_storages(chunk.forward, outputs)}
    names = {FORWARD: (LOSS, *(Binding(SAVED, name) for name in chunk.saved))}
    parts = {name: GraphPart.whole(graph, names.get(name, ())) for name, graph in graphs.items()}
    parts[FORWARD] = _with_results(parts[FORWARD])
    return Strands(
        module,
        graphs,
        parts,
        {name: export(graph, axes, storages.get(name, {})) for name, graph in graphs.items()},
        chunk.saved,
        chunk.parameters,
        chunk.placements,
        data,
        axes,
        groups=groups,
    )


def _with_results(forward: GraphPart) -> GraphPart:
    """The forward, which gives its results too."""
    found = results_of(forward.strand)
    names = (Binding(RESULT, str(number)) for number in found)
    return replace(
        forward, outputs=(*forward.outputs, *found.values()), names=(*forward.names, *names)
    )
