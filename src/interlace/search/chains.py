"""Split a graph into main chains, one per strand, and fillers.

An operator that some collective depends on is on its strand's main chain; the others (weight
gradients above all) are fillers: they may run in any idle moment of the compute lane once their
inputs are there. A chain is cut into pieces: compute operators of one strand in a row,
closed by a collective or cut where they get long, so that the other strand may take a turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.ir.graph import OpGraph


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
class Chain:
    """The main operators of one strand, in order."""

    strand: str
    pieces: tuple[Piece, ...]


def strand_of(operator: str) -> str:
    """`forward` of `forward.mm_3`; empty in a graph of one strand."""
    return operator.rpartition(".")[0]


def main_operators(graph: OpGraph) -> set[str]:
    """Operators that are collectives or that a collective depends on."""
    main: set[str] = set()
    for op in reversed(graph.operators):
        if op.is_collective or op.id in main:
            main.add(op.id)
            main.update(op.inputs)
    return main


def split(
    graph: OpGraph, solo_ns: Mapping[str, int], *, issue_ns: int, longest_ns: int
) -> tuple[list[Chain], tuple[str, ...]]:
    """The chains of all strands, pieces no longer than `longest_ns` unless one operator is,
    and the fillers in graph order."""
    main = main_operators(graph)
    strands: dict[str, list[str]] = {}
    for op in graph.operators:
        strands.setdefault(strand_of(op.id), [])
        if op.id in main:
            strands[strand_of(op.id)].append(op.id)
    chains = [
        Chain(strand, _cut(graph, operators, solo_ns, issue_ns, longest_ns))
        for strand, operators in strands.items()
    ]
    return chains, tuple(op.id for op in graph.operators if op.id not in main)


def _cut(
    graph: OpGraph,
    operators: Sequence[str],
    solo_ns: Mapping[str, int],
    issue_ns: int,
    longest_ns: int,
) -> tuple[Piece, ...]:
    groups: list[list[str]] = [[]]
    length = 0
    for name in operators:
        collective = graph.by_id[name].is_collective
        cost = issue_ns if collective else solo_ns[name]
        if groups[-1] and not collective and length + cost > longest_ns:
            groups.append([])
            length = 0
        groups[-1].append(name)
        length += cost
        if collective:
            groups.append([])
            length = 0
    groups = [group for group in groups if group]
    place = {name: index for index, group in enumerate(groups) for name in group}
    return tuple(_piece(graph, group, place, solo_ns, issue_ns) for group in groups)


def _piece(
    graph: OpGraph,
    group: Sequence[str],
    place: Mapping[str, int],
    solo_ns: Mapping[str, int],
    issue_ns: int,
) -> Piece:
    last = graph.by_id[group[-1]]
    own = place[group[0]]
    needs = {
        place[source]
        for name in group
        for source in graph.by_id[name].inputs
        if graph.by_id[source].is_collective and place[source] < own
    }
    computed = group[:-1] if last.is_collective else group
    return Piece(
        operators=tuple(group),
        compute_ns=sum(solo_ns[n] for n in computed),
        issue_ns=issue_ns if last.is_collective else 0,
        lane=last.lane if last.is_collective else "",
        transfer_ns=solo_ns[last.id] if last.is_collective else 0,
        needs=tuple(sorted(needs)),
    )
