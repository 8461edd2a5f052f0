"""A time that no pipeline of these units can beat, however it is cut, placed and ordered.

1. All work, shared equally by all ranks; the k-th rank to begin waits at least for the forwards of
   the first k units, as the chunks before its first one have a unit each.
2. One unit lies on one rank, which runs it for all micro-batches.
3. A micro-batch goes forward through all units and back.

A pair of passes is shorter than both by a share of `overlap` at most.
"""

from itertools import accumulate

from interlace.search.pipelines.model_units import PipelineProblem


def step_floor_ns(problem: PipelineProblem) -> int:
    """The best bound known here."""
    units, count = problem.units, problem.micro_batches
    faster = 1 - problem.overlap
    before = [0, *accumulate(unit.forward_ns for unit in units)]
    work = sum(unit.work_ns for unit in units)
    shared = (count * work * faster + sum(before[: problem.ranks])) / problem.ranks
    alone = max(before[number] + count * unit.work_ns * faster for number, unit in enumerate(units))
    hops = sorted(unit.boundary_ns for unit in units[:-1])[: problem.ranks - 1]
    chain = before[-1] + sum(unit.input_ns for unit in units) + 2 * sum(hops)
    # Pairs are rounded to whole ns, so a step may be a ns shorter for each of them.
    lost = 2 * count * len(units) if problem.overlap else 0
    return max(int(shared) - lost, int(alone) - lost, chain)
