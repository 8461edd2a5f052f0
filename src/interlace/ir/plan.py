"""Plan: in which order one rank issues its operators, as data that prints and reads back.

A plan has one order per phase of a step: `forward` (the first micro-batch alone), `pair` (forward
of one micro-batch with the backward of the one before) and `backward` (the last one alone).
In `pair` the ids carry their strand: `forward.mm_3`, `backward.all_gather_1`.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from interlace.errors import InputError
from interlace.ir.graph import COMPUTE_LANE, OpGraph

PHASES = ("forward", "pair", "backward")
_HEADER = "interlace plan 1"
_COLUMN = 44


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The order of one phase and the time that the planner expects for it."""

    order: tuple[str, ...]
    predicted_ns: int
    exposed_ns: int
    """Predicted time in which the compute lane waits for a collective."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank issues, in order, in each phase of a step."""

    search: str
    graph_digest: str
    cost_digest: str
    phases: dict[str, PhasePlan]

    @property
    def digest(self) -> str:
        """A hash of the orders; all ranks must have the same one."""
        lines = [f"{name}:{','.join(phase.order)}" for name, phase in sorted(self.phases.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def step_ns(self, micro_batches: int) -> int:
        """Predicted time of F1, F2|B1, ..., FM|B(M-1), BM."""
        alone = self.phases["forward"].predicted_ns + self.phases["backward"].predicted_ns
        return alone + (micro_batches - 1) * self.phases["pair"].predicted_ns


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


def to_text(plan: Plan, graphs: dict[str, OpGraph]) -> str:
    """One line per operator in issue order, one column per lane; `from_text` reads it back."""
    lines = [
        _HEADER,
        f"search {plan.search}  graph {plan.graph_digest}  costs {plan.cost_digest}",
    ]
    for name, phase in plan.phases.items():
        graph = graphs[name]
        lanes = graph.lanes
        lines.append("")
        lines.append(
            f"phase {name}  operators {len(phase.order)}  "
            f"predicted_ns {phase.predicted_ns}  exposed_ns {phase.exposed_ns}"
        )
        lines.append("  " + " | ".join(f"{lane:<{_COLUMN}}" for lane in lanes).rstrip())
        for op_id in phase.order:
            column = lanes.index(graph.by_id[op_id].lane)
            cells = [f"{op_id if i == column else '':<{_COLUMN}}" for i in range(len(lanes))]
            lines.append("  " + " | ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def from_text(text: str, where: str = "plan") -> Plan:
    """Read what `to_text` wrote. Raises InputError naming the line that is wrong."""
    lines = text.splitlines()
    if not lines or lines[0] != _HEADER:
        raise InputError(
            f"{where}: line 1 is not {_HEADER!r}", hint="give a plan written by `interlace plan`"
        )
    head = dict(re.findall(r"(search|graph|costs) (\S+)", lines[1] if len(lines) > 1 else ""))
    if set(head) != {"search", "graph", "costs"}:
        raise InputError(f"{where}: line 2 must give search, graph and costs")
    phases: dict[str, PhasePlan] = {}
    name, fields, order = "", {}, []

    def close() -> None:
        if name:
            if len(order) != int(fields["operators"]):
                raise InputError(
                    f"{where}: phase {name!r} announces {fields['operators']} operators "
                    f"and lists {len(order)}"
                )
            phases[name] = PhasePlan(
                tuple(order), int(fields["predicted_ns"]), int(fields["exposed_ns"])
            )

    for number, line in enumerate(lines[2:], 3):
        found = re.fullmatch(
            r"phase (\w+)  operators (\d+)  predicted_ns (\d+)  exposed_ns (\d+)", line
        )
        if found:
            close()
            keys = ("operators", "predicted_ns", "exposed_ns")
            name, fields, order = found[1], dict(zip(keys, found.groups()[1:], strict=True)), []
            if name not in PHASES or name in phases:
                why = "comes twice" if name in phases else "is not one of " + ", ".join(PHASES)
                raise InputError(f"{where}: line {number}: phase {name!r} {why}")
        elif not line.strip() or line.strip().split()[0] == COMPUTE_LANE:
            continue
        elif not name:
            raise InputError(f"{where}: line {number} comes before any phase: {line!r}")
        else:
            names = [cell.strip() for cell in line.split("|") if cell.strip()]
            if len(names) != 1 or not re.fullmatch(r"[\w.]+", names[0]):
                raise InputError(f"{where}: line {number} must name one operator: {line!r}")
            order.append(names[0])
    close()
    missing = [phase for phase in PHASES if phase not in phases]
    if missing:
        raise InputError(f"{where}: phase {missing[0]!r} is missing", hint="plan again")
    return Plan(head["search"], head["graph"], head["costs"], phases)


def read(path: Path) -> Plan:
    """Read a plan file. Raises InputError when it is missing or malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read plan {path}: {error}") from error
    return from_text(text, str(path))
