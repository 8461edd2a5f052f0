"""The planning problem as a constraint program, solved by CP-SAT of OR-tools.

Written apart from the searches and the simulator: start times instead of orders.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest

from interlace.search.problem import Problem


@dataclass(frozen=True)
class Solved:
    """What the solver found within its limit."""

    length_ns: int
    bound_ns: int
    """No order is shorter; equal to `length_ns` if that is proven to be the optimum."""


def solve(problem: Problem, *, seconds: float) -> Solved:
    """The shortest order in which every operator takes at least 1 ns.

    A collective holds the compute lane while it is issued and its link from then on, links
    taking transfers in the order of their issue.
    """
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    horizon = sum(problem.solo_ns.values()) + problem.issue_ns * len(problem.graph.operators)
    start: dict[str, Any] = {}
    transfer: dict[str, Any] = {}
    on_compute = []
    length = model.new_int_var(0, horizon, "length")
    for op in problem.graph.operators:
        start[op.id] = model.new_int_var(0, horizon, f"start {op.id}")
        held = problem.issue_ns if op.is_collective else problem.solo_ns[op.id]
        on_compute.append(model.new_fixed_size_interval_var(start[op.id], held, f"held {op.id}"))
        model.add(start[op.id] + held <= length)
        if op.is_collective:
            transfer[op.id] = model.new_int_var(0, horizon, f"transfer {op.id}")
            model.add(transfer[op.id] >= start[op.id])
            model.add(transfer[op.id] + problem.solo_ns[op.id] <= length)
        for source in op.inputs:
            began = transfer.get(source, start[source])
            model.add(start[op.id] >= began + problem.solo_ns[source])
            model.add(start[op.id] >= start[source] + problem.issue_ns * (source in transfer))
    model.add_no_overlap(on_compute)
    for first, second in combinations(problem.graph.collectives, 2):
        if first.lane == second.lane:
            chosen = model.new_bool_var(f"{first.id} before {second.id}")
            for one, other, turn in ((first, second, chosen), (second, first, ~chosen)):
                issued = start[one.id] + problem.issue_ns
                over = transfer[one.id] + problem.solo_ns[one.id]
                model.add(issued <= start[other.id]).only_enforce_if(turn)
                model.add(over <= transfer[other.id]).only_enforce_if(turn)
    model.minimize(length)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    return Solved(int(solver.objective_value), round(solver.best_objective_bound))
