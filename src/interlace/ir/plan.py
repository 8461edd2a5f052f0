"""Plan: in which order one rank issues its operators, as data that prints and reads back.

A plan has one order per phase of a step (`ir.phases`): `forward` (the first micro-batch), `pair`
(forward of one micro-batch with the backward of the one before) and `backward` (the last one).
A plan of one strand has no `pair`, and an order for the other micro-batches where they differ.
Where strands meet, ids carry theirs: `forward.mm_3`, `backward.all_gather_1`.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from interlace.errors import InputError
from interlace.ir.graph import COMPUTE_LANE, OpGraph
from interlace.ir.phases import (
    AGAIN,
    BACKWARD,
    BEFORE,
    FORWARD,
    PHASES,
    derived_orders,
    pair_graph,
    phase_graphs,
)

_HEADER = "interlace plan 2"
_BARRIER = "-- barrier --"
_COLUMN = 44
_HEAD = re.compile(r"search (\S+)  graph (\S+)  costs (\S+)  ahead (\d+)")
_PHASE = re.compile(r"phase (\w+)  operators (\d+)  predicted_ns (\d+)  exposed_ns (\d+)")


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The order of one phase and the time that the planner expects for it."""

    order: tuple[str, ...]
    predicted_ns: int
    exposed_ns: int
    """Predicted time in which the compute lane waits for a collective."""
    barriers: tuple[str, ...] = ()
    """Operators after which the rank waits for every collective in flight."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank issues, in order, in each phase of a step."""

    search: str
    graph_digest: str
    cost_digest: str
    phases: dict[str, PhasePlan]
    ahead: int = 0
    """Operators of the forward graph that run one phase ahead (`ir.phases`)."""

    @property
    def digest(self) -> str:
        """A hash of the orders; all ranks must have the same one."""
        lines = [f"ahead:{self.ahead}"]
        for name, phase in sorted(self.phases.items()):
            lines.append(f"{name}:{','.join(phase.order)}:{','.join(phase.barriers)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @property
    def orders(self) -> dict[str, tuple[str, ...]]:
        """The order of every phase that a step runs, also those that follow from others."""
        planned = {name: phase.order for name, phase in self.phases.items()}
        return planned | derived_orders(planned)

    def validate(self, graphs: Mapping[str, OpGraph], where: str) -> None:
        """Raise InputError unless every phase issues each of its operators once, after its inputs,
        and has its barriers at operators of its own. `graphs` are those of the strands."""
        forward = graphs[FORWARD]
        if not 0 <= self.ahead <= len(forward.operators):
            raise InputError(
                f"{where}: ahead {self.ahead} is not between 0 and the "
                f"{len(forward.operators)} operators of the forward graph",
                hint="plan again",
            )
        of_phase = phase_graphs(graphs, self.ahead)
        for name, phase in self.phases.items():
            check(phase.order, of_phase[name], f"{where}, phase {name!r}")
            for barrier in phase.barriers:
                if barrier not in of_phase[name].by_id:
                    raise InputError(
                        f"{where}, phase {name!r}: a barrier follows {barrier!r}, which is not in "
                        f"the graph",
                        hint="plan again",
                    )


def check(order: tuple[str, ...], graph: OpGraph, where: str) -> None:
    """Raise InputError unless `order` holds each operator once, after its inputs."""
    seen: set[str] = set()
    for position, name in enumerate(order, 1):
        if name not in graph.by_id:
            raise InputError(
                f"{where}, operator {position}: {name!r} is not in the graph",
                hint="the plan belongs to another model or parallel layout; plan again",
            )
        if name in seen:
            raise InputError(f"{where}, operator {position}: {name!r} comes twice")
        missing = [i for i in graph.by_id[name].inputs if i not in seen]
        if missing:
            raise InputError(
                f"{where}, operator {position}: {name!r} comes before its input {missing[0]!r}",
                hint=f"move {missing[0]!r} before it, or plan again",
            )
        seen.add(name)
    if len(seen) < len(graph.operators):
        lost = next(op.id for op in graph.operators if op.id not in seen)
        raise InputError(f"{where}: operator {lost!r} of the graph is missing from the plan")


def sequential(graphs: Mapping[str, OpGraph]) -> Plan:
    """One strand: the graphs of the strands in the order in which they were traced."""
    of_phase = phase_graphs(graphs, 0)
    names = [name for name in (FORWARD, AGAIN, BEFORE, BACKWARD) if name in of_phase]
    phases = {name: PhasePlan(of_phase[name].order, 0, 0) for name in names}
    return Plan("sequential", pair_graph(graphs).digest, "-", phases)


def to_text(plan: Plan, graphs: Mapping[str, OpGraph]) -> str:
    """One line per operator in issue order, one column per lane; `from_text` reads it back."""
    lines = [
        _HEADER,
        f"search {plan.search}  graph {plan.graph_digest}  costs {plan.cost_digest}  "
        f"ahead {plan.ahead}",
    ]
    of_phase = phase_graphs(graphs, plan.ahead)
    for name, phase in plan.phases.items():
        graph = of_phase[name]
        lanes = graph.lanes
        lines.append("")
        lines.append(
            f"phase {name}  operators {len(phase.order)}  "
            f"predicted_ns {phase.predicted_ns}  exposed_ns {phase.exposed_ns}"
        )
        lines.append("  " + " | ".join(f"{lane:<{_COLUMN}}" for lane in lanes).rstrip())
        barriers = frozenset(phase.barriers)
        for op_id in phase.order:
            column = lanes.index(graph.by_id[op_id].lane)
            cells = [f"{op_id if i == column else '':<{_COLUMN}}" for i in range(len(lanes))]
            lines.append("  " + " | ".join(cells).rstrip())
            if op_id in barriers:
                lines.append(f"  {_BARRIER}")
    return "\n".join(lines) + "\n"


def from_text(text: str, where: str = "plan") -> Plan:
    """Read what `to_text` wrote. Raises InputError naming the line that is wrong."""
    lines = text.splitlines()
    if not lines or lines[0] != _HEADER:
        raise InputError(
            f"{where}: line 1 is not {_HEADER!r}", hint="give a plan written by `interlace plan`"
        )
    head = _HEAD.fullmatch(lines[1]) if len(lines) > 1 else None
    if head is None:
        raise InputError(f"{where}: line 2 must give search, graph, costs and ahead")
    reader = _Reader(where)
    for number, line in enumerate(lines[2:], 3):
        reader.line(number, line)
    return Plan(head[1], head[2], head[3], reader.finish(), int(head[4]))


class _Reader:
    """Takes the lines after the head one by one."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.phases: dict[str, PhasePlan] = {}
        self.head: re.Match[str] | None = None
        self.order: list[str] = []
        self.barriers: list[str] = []

    def line(self, number: int, line: str) -> None:
        found = _PHASE.fullmatch(line)
        words = line.split()
        if found:
            self._start(number, found)
        elif not words or words[0] == COMPUTE_LANE:
            return
        elif self.head is None:
            raise InputError(f"{self.where}: line {number} comes before any phase: {line!r}")
        elif line.strip() == _BARRIER:
            if not self.order:
                raise InputError(f"{self.where}: line {number}: a barrier before any operator")
            self.barriers.append(self.order[-1])
        else:
            names = [cell.strip() for cell in line.split("|") if cell.strip()]
            if len(names) != 1 or not re.fullmatch(r"[\w.]+", names[0]):
                raise InputError(f"{self.where}: line {number} must name one operator: {line!r}")
            self.order.append(names[0])

    def _start(self, number: int, found: re.Match[str]) -> None:
        self._close()
        name = found[1]
        if name not in PHASES or name in self.phases:
            why = "comes twice" if name in self.phases else "is not one of " + ", ".join(PHASES)
            raise InputError(f"{self.where}: line {number}: phase {name!r} {why}")
        self.head, self.order, self.barriers = found, [], []

    def _close(self) -> None:
        if self.head is None:
            return
        name, count, predicted, exposed = self.head.groups()
        if len(self.order) != int(count):
            raise InputError(
                f"{self.where}: phase {name!r} announces {count} operators "
                f"and lists {len(self.order)}"
            )
        self.phases[name] = PhasePlan(
            tuple(self.order), int(predicted), int(exposed), tuple(self.barriers)
        )

    def finish(self) -> dict[str, PhasePlan]:
        self._close()
        missing = [phase for phase in PHASES if phase not in self.phases]
        if missing:
            raise InputError(f"{self.where}: phase {missing[0]!r} is missing", hint="plan again")
        return self.phases


def read(path: Path) -> Plan:
    """Read a plan file. Raises InputError when it is missing or malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read plan {path}: {error}") from error
    return from_text(text, str(path))
