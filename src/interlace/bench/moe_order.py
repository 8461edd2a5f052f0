"""The order that published systems fix by hand for experts, as a plan of two strands.

Megatron-LM and MindSpeed run the forward of layer i beside the backward of layer L - 1 - i:

    attention forward  hides  combine backward
    MLP backward       hides  dispatch forward
    MLP forward        hides  dispatch backward     (behind the weight gradients of the MLP)
    attention backward hides  combine forward       (before the weight gradients of attention)

A segment is what lies between two exchanges of rows, by what each operator waits for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from interlace.errors import InputError
from interlace.experts import between_ranks
from interlace.ir.actions import Direction, Strand
from interlace.ir.graph import OpGraph
from interlace.ir.phases import phase_graph, whole_graph
from interlace.ir.plan import PhasePlan, Plan
from interlace.schedules.finder import of_strands

EXCHANGE = str(between_ranks.EXCHANGE)
"""The operator that moves rows to experts, and back, as graphs name it."""
_FORWARD, _BACKWARD = (Strand(direction).graph for direction in Direction)


@dataclass(frozen=True)
class _Segments:
    """A strand cut at its exchanges of rows."""

    chain: list[list[str]]
    """Between exchanges, in order; all but the last end with the exchange."""
    fillers: list[list[str]]
    """What could run with each segment, and no exchange waits for: gradients of weights."""


def fixed_plan(graphs: Mapping[str, OpGraph]) -> Plan:
    """The hand order for `graphs`, those of the strands. Every phase of one strand runs as traced.

    Raises InputError unless both strands have two exchanges for each layer."""
    schedule = of_strands(2)
    pair = f"{_FORWARD}+{_BACKWARD}"
    phases = {}
    for phase in schedule.phases(graphs):
        order = phase_graph(phase, graphs, 0).order
        if phase == pair:
            forward = _cut(graphs[_FORWARD], fillers=False)
            order = _hand_order(forward, _cut(graphs[_BACKWARD], fillers=True))
        phases[phase] = PhasePlan(order, 0, 0)
    if pair not in phases:
        raise InputError(f"no phase {pair!r} among {', '.join(phases)}", hint="use two_strand")
    return Plan("by_hand", whole_graph(graphs).digest, "none", schedule.name, phases)


def _hand_order(forward: _Segments, backward: _Segments) -> tuple[str, ...]:
    if len(forward.chain) != len(backward.chain) or len(forward.chain) % 2 == 0:
        raise InputError(
            f"the forward has {len(forward.chain) - 1} exchanges of rows, and the backward "
            f"{len(backward.chain) - 1}",
            hint="give every layer experts",
        )
    found: list[str] = []

    def run(strand: str, operators: list[str]) -> None:
        found.extend(f"{strand}.{name}" for name in operators)

    run(_BACKWARD, backward.chain[0])
    for k in range(0, len(forward.chain) - 1, 2):
        run(_BACKWARD, backward.fillers[k] if k == 0 else [])
        run(_FORWARD, forward.chain[k])
        run(_BACKWARD, backward.chain[k + 1])
        run(_BACKWARD, backward.fillers[k + 1])
        run(_FORWARD, forward.chain[k + 1])
        run(_BACKWARD, backward.chain[k + 2])
        run(_BACKWARD, backward.fillers[k + 2])
    run(_FORWARD, forward.chain[-1])
    return tuple(found)


def _cut(graph: OpGraph, *, fillers: bool) -> _Segments:
    """`fillers` says whether operators that no exchange waits for stand apart."""
    exchanges = [op.id for op in graph.operators if op.target == EXCHANGE]
    place = {name: number for number, name in enumerate(exchanges, 1)}
    level: dict[str, int] = {}
    for op in graph.operators:
        behind = [level[source] for source in op.inputs]
        behind += [place[source] for source in op.inputs if source in place]
        level[op.id] = max(behind, default=0)
    needed: set[str] = set()
    for op in reversed(graph.operators):
        if op.id in place or op.id in needed:
            needed.update((op.id, *op.inputs))
    last = len(exchanges)
    chain: list[list[str]] = [[] for _ in range(last + 1)]
    apart: list[list[str]] = [[] for _ in range(last + 1)]
    for op in graph.operators:
        stays = not fillers or op.id in needed or level[op.id] == last
        (chain if stays else apart)[level[op.id]].append(op.id)
    for number, name in enumerate(exchanges):  # the exchange begins when all of it is there
        chain[number].remove(name)
        chain[number].append(name)
    return _Segments(chain, apart)
