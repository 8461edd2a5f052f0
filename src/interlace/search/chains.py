"""Split a graph into main chains, one per job, and fillers.

An operator that some collective depends on is on its job's main chain; the others (weight
gradients above all) are fillers: they may run in any idle moment of the compute lane once their
inputs are there. A chain is cut into pieces: compute operators of one job in a row, closed by a
collective or cut where they get long, so that the other job may take a turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.ir.actions import Share, label_of, strand
from interlace.ir.graph import Operator, OpGraph, once_a_graph
from interlace.search.problem import Problem


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one chain that runs without a break."""

    operators: tuple[str, ...]
    """Compute operators, then the collective if there is one."""
    compute_ns: int
    """Time on the compute lane before the collective is issued."""
    issue_ns: int
    """Time on the compute lane to issue it, while the transfer already runs."""
    lane: str
    """Link of the collective that closes the piece, or empty."""
    transfer_ns: int
    needs: tuple[int, ...]
    """Earlier pieces of the chain whose collectives must be over before this one starts."""


@dataclass(frozen=True, slots=True)
class Filler:
    """Operators that no collective depends on, run without a break."""

    operators: tuple[str, ...]
    compute_ns: int
    release: int
    """Pieces of the chain that must have been issued before."""
    needs: tuple[int, ...]
    """Pieces whose collectives must be over before it starts."""


@dataclass(frozen=True, slots=True)
class Chain:
    """One job: its main operators in order, and its fillers by release."""

    job: str
    pieces: tuple[Piece, ...]
    fillers: tuple[Filler, ...] = ()


def job_of(label: str) -> str:
    """The job that a strand belongs to: its walk through the model, forward or backward. All
    operators of a graph of one strand, which have no label, are one job."""
    return strand(label).walk if label else ""


def _is_head(label: str) -> bool:
    """Whether a strand works for a later micro-batch than the others of its walk."""
    return bool(label) and strand(label).share == Share.HEAD


@once_a_graph
def jobs(graph: OpGraph) -> dict[str, list[Operator]]:
    """The operators of each job in graph order, those for a later micro-batch behind the others.

    If all operators belong to one job, nothing else is there to run beside it, and those for a
    later micro-batch are a job of their own, unless they need what is gathered for both: chains
    are merged as if no job needed another. So what is exchanged once a step is of the job of the
    chunk that it works for.
    """
    heads = {op.id for op in graph.operators if _is_head(label_of(op.id))}
    alone = len({job_of(label_of(op.id)) for op in graph.operators}) == 1 and all(
        source in heads for op in graph.operators if op.id in heads for source in op.inputs
    )
    job = {
        op.id: label if alone and op.id in heads else job_of(label)
        for op in graph.operators
        for label in [label_of(op.id)]
    }
    home: dict[str, str] = {name: name for name in job.values()}
    for op in graph.operators:
        for source in op.inputs:
            first, then = home[job[source]], home[job[op.id]]
            if first != then:
                home = {name: first if own == then else own for name, own in home.items()}
    found: dict[str, list[Operator]] = {}
    for op in sorted(graph.operators, key=lambda op: op.id in heads):  # stable
        found.setdefault(home[job[op.id]], []).append(op)
    return found


def main_operators(graph: OpGraph) -> set[str]:
    """Operators that are collectives or that a collective depends on."""
    main: set[str] = set()
    for op in reversed(graph.operators):
        if op.is_collective or op.id in main:
            main.add(op.id)
            main.update(op.inputs)
    return main


def split(problem: Problem, longest_ns: int) -> list[Chain]:
    """The chains of all jobs; pieces and fillers no longer than `longest_ns` unless one operator
    is."""
    main = main_operators(problem.graph)
    found = []
    for job, operators in jobs(problem.graph).items():
        groups = _cut(problem, [op for op in operators if op.id in main], longest_ns)
        place = {op.id: index for index, group in enumerate(groups) for op in group}
        pieces = tuple(_piece(problem, group, place) for group in groups)
        loose = [op for op in operators if op.id not in main]
        found.append(Chain(job, pieces, _fillers(problem, loose, place, longest_ns)))
    return found


def _cut(problem: Problem, operators: Sequence[Operator], longest_ns: int) -> list[list[Operator]]:
    groups: list[list[Operator]] = [[]]
    length = 0
    for op in operators:
        cost = problem.issue_ns if op.is_collective else problem.solo_ns[op.id]
        if groups[-1] and not op.is_collective and length + cost > longest_ns:
            groups.append([])
            length = 0
        groups[-1].append(op)
        length += cost
        if op.is_collective:
            groups.append([])
            length = 0
    return [group for group in groups if group]


def _piece(problem: Problem, group: Sequence[Operator], place: Mapping[str, int]) -> Piece:
    by_id, last = problem.graph.by_id, group[-1]
    own = place[last.id]
    sources = {source for op in group for source in op.inputs if by_id[source].is_collective}
    computed = group[:-1] if last.is_collective else group
    return Piece(
        operators=tuple(op.id for op in group),
        compute_ns=sum(problem.solo_ns[op.id] for op in computed),
        issue_ns=problem.issue_ns if last.is_collective else 0,
        lane=last.lane if last.is_collective else "",
        transfer_ns=problem.solo_ns[last.id] if last.is_collective else 0,
        needs=tuple(sorted({place[source] for source in sources if place[source] < own})),
    )


def _fillers(
    problem: Problem, loose: Sequence[Operator], place: Mapping[str, int], longest_ns: int
) -> tuple[Filler, ...]:
    by_id = problem.graph.by_id
    release: dict[str, int] = {}
    keys: dict[str, tuple[int, tuple[int, ...]]] = {}
    for op in loose:
        after = [release[i] if i in release else place[i] + 1 for i in op.inputs]
        release[op.id] = max(after, default=0)
        needs = {place[i] for i in op.inputs if by_id[i].is_collective}
        keys[op.id] = (release[op.id], tuple(sorted(needs)))
    found: list[Filler] = []
    for op in sorted(loose, key=lambda op: release[op.id]):  # stable
        after_pieces, needs = keys[op.id]
        time = problem.solo_ns[op.id]
        last = found[-1] if found else None
        if (
            last
            and last.release == after_pieces
            and set(needs) <= set(last.needs)
            and last.compute_ns + time <= longest_ns
        ):
            joined = (*last.operators, op.id)
            found[-1] = Filler(joined, last.compute_ns + time, after_pieces, last.needs)
        else:
            found.append(Filler((op.id,), time, after_pieces, needs))
    return tuple(found)
