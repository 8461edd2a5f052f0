"""A search in one file: whatever can start first, starts first, and transfers before compute."""

from collections import defaultdict

from interlace.ir.graph import Operator
from interlace.search.problem import Problem


def first_come(problem: Problem) -> tuple[str, ...]:
    """The ids of all operators, each after its inputs, by a clock that runs along. An operator
    waits for its inputs; compute has one lane, and every link one of its own."""
    waiting = list(problem.graph.operators)
    done_ns: dict[str, int] = {}
    free_ns: defaultdict[str, int] = defaultdict(int)

    def start_ns(op: Operator) -> int:
        return max([free_ns["compute"], *(done_ns[source] for source in op.inputs)])

    while waiting:
        ready = [op for op in waiting if all(source in done_ns for source in op.inputs)]
        op = min(ready, key=lambda each: (start_ns(each), not each.is_collective))
        begun = max(start_ns(op), free_ns[op.lane])
        done_ns[op.id] = free_ns[op.lane] = begun + problem.solo_ns[op.id]
        if op.is_collective:
            free_ns["compute"] += problem.issue_ns
        waiting.remove(op)
    return tuple(done_ns)
