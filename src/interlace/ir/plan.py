"""Plan: in which order one rank issues its operators, as data that prints and reads back.

A plan has one order per phase of its schedule (`ir.actions`). With two strands these are
`forward+next` (the first micro-batch), `rest+next+backward` (forward of one micro-batch with the
backward of the one before) and `backward` (the last one). Where strands meet, ids carry theirs:
`forward.mm_3`, `backward.all_gather_1`.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from interlace.errors import InputError
from interlace.ir.actions import Share, label_of, strands_of
from interlace.ir.graph import COMPUTE_LANE, OpGraph
from interlace.ir.phases import phase_graph
from interlace.old_words import present_search

_HEADER = "interlace plan 3"
"""First line of a plan file; its number goes up when older files can no longer be read."""
_BARRIER = "-- barrier --"
"""The line of a plan file that stands for a barrier."""
_COLUMN = 44
"""Characters of a lane's column in a plan file; a choice."""
_HEAD = re.compile(r"search (\S+)  graph (\S+)  costs (\S+)  schedule (\S+)  head (\d+)")
"""Finds the values of the second line of a plan file."""
_PHASE = re.compile(r"phase (\S+)  operators (\d+)  predicted_ns (\d+)  exposed_ns (\d+)")
"""Finds the values of the line that a phase begins with."""


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
    schedule: str
    """The name of the schedule whose phases these are (`schedules`)."""
    phases: dict[str, PhasePlan]
    head: int = 0
    """Operators of the forward graph that run one action ahead."""

    @property
    def digest(self) -> str:
        """A hash of the orders; all ranks must have the same one."""
        lines = [f"schedule:{self.schedule}", f"head:{self.head}"]
        for name, phase in sorted(self.phases.items()):
            lines.append(f"{name}:{','.join(phase.order)}:{','.join(phase.barriers)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def of_phase(self, phase: str) -> PhasePlan | None:
        """The order of a phase; where the plan has none, that of a phase which also runs the head
        of a later forward, without that head. None if it has neither. Of a derived order nobody
        has predicted the time: it counts as 0."""
        if phase in self.phases:
            return self.phases[phase]
        for name, planned in self.phases.items():
            if phase == without_heads(name):
                return _headless(name, planned)
        return None

    def needed(self, phase: str) -> PhasePlan:
        """As `of_phase`. Raises InputError if the plan has no order for the phase."""
        found = self.of_phase(phase)
        if found is None:
            raise InputError(
                f"the plan has no order for phase {phase!r}, only for {', '.join(self.phases)}",
                hint="plan again for this schedule",
            )
        return found

    def validate(self, graphs: Mapping[str, OpGraph], where: str) -> None:
        """Raise InputError unless every phase issues each of its operators once, after its inputs,
        and has its barriers at operators of its own. `graphs` are those of the strands."""
        self._check_head(graphs, where)
        for name, phase in self.phases.items():
            graph = phase_graph(name, graphs, self.head)
            check(phase.order, graph, f"{where}, phase {name!r}")
            for barrier in phase.barriers:
                if barrier not in graph.by_id:
                    raise InputError(
                        f"{where}, phase {name!r}: a barrier follows {barrier!r}, which is not in "
                        f"the graph",
                        hint="plan again",
                    )

    def _check_head(self, graphs: Mapping[str, OpGraph], where: str) -> None:
        if not self.head:
            return
        heads = [each.graph for name in self.phases for each in strands_of(name)
                 if each.share == Share.HEAD]  # fmt: skip
        if not heads:
            raise InputError(
                f"{where}: head {self.head}, and no phase runs the head of a forward",
                hint="plan again",
            )
        graph = graphs.get(heads[0])
        if graph is None or not 0 <= self.head <= len(graph.operators):
            count = len(graph.operators) if graph else 0
            raise InputError(
                f"{where}: head {self.head} is not between 0 and the {count} operators of the "
                "forward graph",
                hint="plan again",
            )


def without_heads(phase: str) -> str:
    """The name of the phase without heads of later forwards; empty if nothing else is in it."""
    words = phase.split("+")
    return "+".join(word for word in words if strands_of(word)[0].share != Share.HEAD)


def _headless(name: str, planned: PhasePlan) -> PhasePlan:
    strands = strands_of(name)
    left = [each.label for each in strands if each.share != Share.HEAD]

    def kept(operators: tuple[str, ...]) -> tuple[str, ...]:
        names = [each for each in operators if label_of(each) in left]
        return tuple(n.rpartition(".")[2] if len(left) == 1 else n for n in names)

    return PhasePlan(kept(planned.order), 0, 0, kept(planned.barriers))


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


def to_text(plan: Plan, graphs: Mapping[str, OpGraph]) -> str:
    """One line per operator in issue order, one column per lane; `from_text` reads it back."""
    lines = [
        _HEADER,
        f"search {plan.search}  graph {plan.graph_digest}  costs {plan.cost_digest}  "
        f"schedule {plan.schedule}  head {plan.head}",
    ]
    for name, phase in plan.phases.items():
        graph = phase_graph(name, graphs, plan.head)
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
            f"{where}: line 1 is not {_HEADER!r}",
            hint="give a plan written by `interlace plan` of this version",
        )
    head = _HEAD.fullmatch(lines[1]) if len(lines) > 1 else None
    if head is None:
        raise InputError(f"{where}: line 2 must give search, graph, costs, schedule and head")
    reader = _Reader(where)
    for number, line in enumerate(lines[2:], 3):
        reader.line(number, line)
    search = present_search(head[1], f"{where}: search")
    return Plan(search, head[2], head[3], head[4], reader.finish(), int(head[5]))


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
        try:
            strands_of(name)
        except InputError as error:
            where = f"{self.where}: line {number}: phase {name!r}"
            raise InputError(f"{where}: {error.message}", hint=error.hint) from error
        if name in self.phases:
            raise InputError(f"{self.where}: line {number}: phase {name!r} comes twice")
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
        return self.phases


def read(path: Path) -> Plan:
    """Read a plan file. Raises InputError when it is missing or malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read plan {path}: {error}") from error
    return from_text(text, str(path))
