"""The search for pipelines against optima of CP-SAT over every cut and every placement of small
models. The constraint program is written apart from the search and the simulator."""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings

from interlace.search.pipelines.chunk_layouts import ChunkLayout
from interlace.search.pipelines.model_units import PipelineProblem
from interlace.search.pipelines.pipeline_search import search_pipeline
from pipeline_models import problems

FACTOR = 1.1
"""The search may be so much longer than the optimum of a small model."""


@settings(deadline=None, max_examples=100)
@given(
    problem=problems(most_ranks=2, most_units=4, most_micro_batches=3, overlaps=(0.0,)),
)
def test_small_models_are_near_their_optimum(problem: PipelineProblem) -> None:
    """Never shorter than the optimum, at most a tenth longer; and no bound is above it."""
    best = min(optimum(problem, layout) for layout in layouts(problem))
    found = search_pipeline(problem, tries=600)
    assert found.floor_ns <= best <= found.step.step_ns <= FACTOR * best


def layouts(problem: PipelineProblem) -> Iterator[ChunkLayout]:
    """All cuts into as many chunks as a search may make, on all ranks in all ways."""
    units, ranks = len(problem.units), problem.ranks
    for chunks in range(ranks, min(units, ranks * problem.most_chunks) + 1, ranks):
        for cut in combinations(range(1, units), chunks - 1):
            for rank_of in product(range(ranks), repeat=chunks):
                if rank_of[0] == 0 and len(set(rank_of)) == ranks:
                    yield ChunkLayout((0, *cut), rank_of)


def optimum(problem: PipelineProblem, layout: ChunkLayout) -> int:
    """The shortest step on a layout, with backwards cut wherever that helps."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    costs = layout.costs(problem)
    chunks, counts = range(len(costs.chunks)), range(problem.micro_batches)
    horizon = problem.micro_batches * sum(u.work_ns + 2 * u.boundary_ns for u in problem.units)
    length = model.new_int_var(0, horizon, "length")
    lanes: dict[Any, list[Any]] = {}

    def interval(lane: Any, ns: int) -> tuple[Any, Any]:
        """(start, end) of something that takes so long on a lane."""
        start = model.new_int_var(0, horizon, "")
        lanes.setdefault(lane, []).append(model.new_fixed_size_interval_var(start, ns, ""))
        model.add(start + ns <= length)
        return start, start + ns

    def arrived(end: Any, source: int, to: int) -> Any:
        """When what a chunk made is on the rank of another one."""
        ranks = layout.rank_of[source], layout.rank_of[to]
        if ranks[0] == ranks[1]:
            return end
        start, over = interval(ranks, costs.messages_ns[min(source, to), max(source, to)])
        model.add(start >= end)
        return over

    for _ in counts:
        end: Any = 0
        for chunk in chunks:
            start, over = interval(layout.rank_of[chunk], costs.chunks[chunk].forward_ns)
            model.add(start >= (arrived(end, chunk - 1, chunk) if chunk else 0))
            end = over
        for chunk in reversed(chunks):
            cost, rank = costs.chunks[chunk], layout.rank_of[chunk]
            start, over = interval(rank, cost.input_ns)
            model.add(start >= (arrived(end, chunk + 1, chunk) if chunk < chunks[-1] else end))
            end = over
            late, _ = interval(rank, cost.weight_ns)
            model.add(late >= over)
    for lane in lanes.values():
        model.add_no_overlap(lane)
    model.minimize(length)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 20
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, solver.status_name(status)
    return int(solver.objective_value)
