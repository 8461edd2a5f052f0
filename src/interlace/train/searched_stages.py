"""`interlace plan --search-pipeline`: cut, places and order of a pipeline for one traced model.

The blocks of the model are the units of the search (`search.pipelines`): what their passes cost and
keep, what they hand on and hold, follows from the graph of each. What is found is then simulated as
every other schedule is, on the very chunks, with all edges between them.
"""

from interlace.ir.actions import Direction, Strand, phase_of
from interlace.ir.graph import OpGraph
from interlace.report.stage_tables import StagedStep
from interlace.runtime.chunks import ChunkedModel, Placement
from interlace.runtime.split_places import blocks_of
from interlace.schedules.finder import find
from interlace.search.pipelines.model_units import ModelUnit, PipelineProblem
from interlace.search.pipelines.pipeline_search import search_pipeline
from interlace.train.stage_plans import StagePlanner

_FIRST = "what comes first"
"""Name of the unit before the first block; no chunk begins with it but the first."""


def search_stages(planner: StagePlanner, memory_bytes: int = 0) -> StagedStep:
    """The step of the pipeline that the search finds for the planner's model, where a rank may hold
    and keep so much (0 for no limit).

    Raises InputError for a model of fewer blocks than ranks, and where nothing fits."""
    parallel, train = planner.config.parallel, planner.config.train
    names = blocks_of(planner.strands)
    cut = Placement(
        rank_of=tuple(range(1 + len(names))), halves=True, split_at=names, data=planner.data
    )
    model = planner.model(cut)
    units = _units(planner, model, (_FIRST, *names))
    problem = PipelineProblem(
        units=units,
        ranks=parallel.pipeline,
        micro_batches=train.micro_batches,
        memory_bytes=memory_bytes,
        everywhere_bytes=planner.held_bytes(model.handovers, 0).get("buffers", 0),
        overlap=_overlap(planner, model, units),
    )
    found = search_pipeline(problem)
    return planner.step(find(found.schedule), found.split_at)


def _units(
    planner: StagePlanner, model: ChunkedModel, names: tuple[str, ...]
) -> tuple[ModelUnit, ...]:
    messages = planner.messages(model.handovers)
    found = []
    for number, name in enumerate(names):
        cost = planner.chunk_costs(model, number)
        held = planner.held_bytes(model.handovers, number)
        found.append(
            ModelUnit(
                name=name,
                forward_ns=cost.forward_ns,
                input_ns=cost.input_ns,
                weight_ns=cost.weight_ns,
                boundary_ns=messages.get((number, number + 1), 0),
                saved_bytes=cost.saved_bytes,
                kept_bytes=cost.kept_bytes,
                held_bytes=sum(held.values()) - held.get("buffers", 0),
            )
        )
    return tuple(found)


def _overlap(planner: StagePlanner, model: ChunkedModel, units: tuple[ModelUnit, ...]) -> float:
    """By how much a forward and a backward of the busiest block with collectives inside are shorter
    side by side, as planned; nothing hides without collectives."""
    graphs = model.op_graphs
    passes = {number: [Strand(way, number) for way in Direction] for number in range(len(units))}
    able = [n for n, own in passes.items() if all(_communicates(graphs[s.label]) for s in own)]
    if not able:
        return 0.0
    busiest = passes[max(able, key=lambda number: units[number].work_ns)]
    alone = sum(planner.phase_ns(each.label, graphs) for each in busiest)
    return max(0.0, 1 - planner.phase_ns(phase_of(busiest), graphs) / alone)


def _communicates(graph: OpGraph) -> bool:
    return any(op.is_collective for op in graph.operators)
