"""`interlace plan` of a pipeline: its schedule and all others on the chunks of one traced model.

The model is traced once. For each schedule its graphs are cut into that schedule's chunks, passes
that run side by side are planned as training would plan them, and the step of all ranks is
simulated with the times of passes and messages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from interlace.compiled import StepSettings
from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.hardware.cluster import Cluster
from interlace.hardware.cluster_costs import ClusterMachine
from interlace.hardware.computed_costs import Machine
from interlace.ir.actions import Direction, Share, Strand, strands_of
from interlace.ir.costs import CostTable
from interlace.ir.graph import Kind, OpGraph
from interlace.ir.phases import phase_graph
from interlace.ir.stage_messages import Edge
from interlace.parallel.data import DataLayout
from interlace.parallel.meshes import PIPELINE_AXIS
from interlace.report.stage_tables import StagedStep
from interlace.runtime.chunks import ChunkedModel, Placement, chunked
from interlace.runtime.handovers import Handovers
from interlace.runtime.memory_limit import constant_bytes
from interlace.runtime.traced_strands import Strands
from interlace.schedules.declared import AS_SHORT
from interlace.schedules.finder import Schedule, find
from interlace.schedules.stage import StageSchedule
from interlace.search.memory import chunk_bytes
from interlace.search.planner import plan_phase
from interlace.search.problem import Problem
from interlace.sim.lanes import simulate
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts
from interlace.sim.pipeline_step import simulate_pipeline
from interlace.train.plan_costs import machine_of


@dataclass
class StagePlanner:
    """Simulates the steps that schedules make of one traced model."""

    config: RunConfig
    strands: Strands
    """Of the whole model, not cut."""
    costs: CostTable
    settings: StepSettings
    machine: Machine
    """Whose links carry what goes from stage to stage."""
    data: DataLayout | None = None
    """How the ranks of a stage share weights that they gather for each pass."""
    _found: dict[str, int] = field(default_factory=dict)
    """Times of phases, by the digest of their graphs."""
    _models: dict[Placement, ChunkedModel] = field(default_factory=dict)
    """The model in the chunks of schedules that were looked at."""

    def step(self, schedule: Schedule, split_at: Sequence[str] = ()) -> StagedStep:
        """The step by this schedule, with chunks that begin with these sub-modules. Raises
        InputError if it cannot run so, or the model is too small for its chunks."""
        split_at = tuple(split_at) or schedule.split_at
        ranks, count = self.config.parallel.pipeline, self.config.train.micro_batches
        stage = StageSchedule(schedule.name, schedule.function, ranks=ranks, rank=0)
        model = self.model(
            Placement(
                rank_of=stage.rank_of,
                halves=stage.cuts_backwards,
                split_at=split_at,
                data=self.data,
            )
        )
        actions = stage.with_edges(model.handovers.edges).lists(count)
        phases = {each.phase for own in actions for each in own}
        pairs = {name: self.phase_ns(name, model.op_graphs) for name in phases if "+" in name}
        chunks = len(model.handovers.rank_of)
        step = simulate_pipeline(
            actions,
            PipelineCosts(
                chunks=[self.chunk_costs(model, chunk) for chunk in range(chunks)],
                pairs_ns=pairs,
                messages_ns=self.messages(model.handovers),
                edges=model.handovers.edges,
            ),
            label=schedule.name,
        )
        return StagedStep(
            schedule=schedule.name,
            rank_of=model.handovers.rank_of,
            actions=actions,
            step=step,
            constant_bytes=tuple(
                sum(self.held_bytes(model.handovers, rank).values()) for rank in range(ranks)
            ),
            split_at=split_at,
        )

    def model(self, placement: Placement) -> ChunkedModel:
        """The model in these chunks."""
        if placement not in self._models:
            self._models[placement] = chunked(self.strands, placement)
        return self._models[placement]

    def chunk_costs(self, model: ChunkedModel, number: int) -> ChunkCosts:
        """What the passes of a chunk cost, each alone."""
        graphs = model.op_graphs

        def ns(direction: Direction, share: Share = Share.WHOLE) -> int:
            label = Strand(direction, number, share).label
            return self.phase_ns(label, graphs) if label in graphs else 0

        halves = ns(Direction.BACKWARD, Share.INPUT), ns(Direction.BACKWARD, Share.WEIGHT)
        first, late = halves if any(halves) else (ns(Direction.BACKWARD), 0)
        saved, kept = chunk_bytes(graphs, number)
        return ChunkCosts(
            forward_ns=ns(Direction.FORWARD),
            input_ns=first,
            weight_ns=late,
            saved_bytes=saved,
            kept_bytes=kept,
        )

    def phase_ns(self, name: str, graphs: Mapping[str, OpGraph]) -> int:
        """A pass alone in traced order, passes side by side as they would be planned."""
        graph = phase_graph(name, graphs, 0)
        if graph.digest not in self._found:
            self._found[graph.digest] = self._simulated(name, graph)
        return self._found[graph.digest]

    def _simulated(self, name: str, graph: OpGraph) -> int:
        costs, bound = self.costs, self.settings.limits.bound_bytes
        if len(strands_of(name)) > 1:
            problem = Problem(graph, costs.of(graph), costs.issue_ns, bound, costs.contention)
            return plan_phase(problem, self.settings.plan.search).predicted_ns
        return simulate(
            graph,
            graph.order,
            costs.of(graph),
            issue_ns=costs.issue_ns,
            contention=costs.contention,
        ).length_ns

    def messages(self, handovers: Handovers) -> dict[Edge, int]:
        """Nanoseconds of what goes over each edge, there or back, the longer one."""
        found: dict[Edge, int] = {}
        for (_, source, to), values in handovers.messages.items():
            size = sum(value.like.nbytes for value in values)
            ns = self.machine.collective_ns(Kind.SEND, size, PIPELINE_AXIS, 2) if size else 0
            edge = min(source, to), max(source, to)
            found[edge] = max(found.get(edge, 0), ns)
        return found

    def held_bytes(self, handovers: Handovers, rank: int) -> dict[str, int]:
        """What a rank has all the time, by name; buffers are on every rank."""
        held = [name for name in handovers.readers if rank in handovers.holders(name)]
        parallel, dtype = self.config.parallel, self.config.train.dtype
        return constant_bytes(parallel, dtype, self.strands.module, None, held)


def machine_for(config: RunConfig, cluster: Cluster | None) -> Machine:
    """What carries messages between stages, whose ranks lie `stage_ranks` apart."""
    if cluster is None:
        return machine_of(config)[0]
    apart, stages = config.parallel.stage_ranks, config.parallel.pipeline
    hops = [(rank, rank + apart) for rank in range(apart * (stages - 1))]
    return ClusterMachine(cluster, {PIPELINE_AXIS: hops})


def steps_of_all(
    planner: StagePlanner, schedules: Iterable[Schedule], chosen: StagedStep
) -> tuple[list[StagedStep], dict[str, str]]:
    """The steps of these schedules, the fastest first, and why others make none, by name. Those
    with as many chunks as `chosen` begin them with the same sub-modules."""
    found, left_out = [], {}
    for schedule in schedules:
        has_as_many = schedule.chunks * len(chosen.actions) == len(chosen.rank_of)
        try:
            split_at = planner.config.pipeline.split_at if has_as_many else ()
            found.append(planner.step(schedule, split_at))
        except InputError as error:
            left_out[schedule.name] = error.message
    return sorted(found, key=lambda each: each.step.step_ns), left_out


def eager_enough(planner: StagePlanner, steps: Sequence[StagedStep]) -> list[StagedStep]:
    """Of schedules with a choice of options, as `eager_folded` has of how far it runs ahead: the
    options that keep the fewest values of those whose step is about as short as the shortest, which
    the times of this model and its links decide; nothing if that is the default."""
    chosen = []
    for default in steps:
        *others, _ = find(default.schedule).variants(len(default.actions))
        found = [planner.step(schedule) for schedule in others]
        bound = AS_SHORT * min(each.step.step_ns for each in (*found, default))
        chosen += [each for each in found if each.step.step_ns <= bound][:1]
    return chosen
