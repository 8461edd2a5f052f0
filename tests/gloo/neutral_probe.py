"""How the record of neutral changes reaches the product: every name of `interlace` that it needs.

`tests/gloo/neutral.json` says what graphs, plans, losses and gradients were before the structure of
the package changed. What is written there is plain data, made by the functions of this file alone,
so that a change of structure touches this file and leaves record, run files and test as they are.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from interlace.cli.run_file import load_run_config
from interlace.config import RunConfig
from interlace.ir.actions import Action, Direction, Share, strands_of
from interlace.ir.costs import CostTable
from interlace.ir.graph import Operator, OpGraph
from interlace.ir.phases import phase_graph, whole_graph
from interlace.ir.plan import Plan, to_text, without_heads
from interlace.ir.timeline import Span, Timeline
from interlace.report.plan_figures import plan_figures
from interlace.rules import check
from interlace.runtime.memory_limit import constant_bytes, memory_limits
from interlace.schedules.finder import find, sequential
from interlace.search.planner import make_plan
from interlace.search.problem import MemoryLimits
from interlace.sim.simulated_step import simulate_step
from interlace.train.fake_trace import trace_fake
from interlace.train.plan_costs import computed_costs
from interlace.train.worker import main

SEARCHES = {"exact": "merge", "list": "list", "paper": "segment_pairs"}
"""Name in the record: name in the package."""
STRANDS = {
    "gather": "gather",
    "first": "first",
    "forward": "forward",
    "backward": "backward",
    "final": "final",
    "reduce": "reduce",
}
"""Name of a strand's graph in the package: name in the record."""


@dataclass(frozen=True)
class Traced:
    """A run file, the graphs of its strands as rank 0 traces them, and costs that follow from the
    run file alone."""

    config: RunConfig
    graphs: Mapping[str, OpGraph]
    costs: CostTable
    limits: MemoryLimits
    constant: Mapping[str, int]


def trace(run_file: str, settings: Mapping[str, str]) -> Traced:
    """Trace the model of a run file on fake tensors; `settings` are dotted overrides as text.

    Raises InputError for a run file that cannot work."""
    config = load_run_config(run_file, settings)
    check(config)
    strands = trace_fake(config).whole
    costs, _ = computed_costs(config, strands.op_graphs)
    held = constant_bytes(config.parallel, config.train.dtype, strands.module, strands.data)
    return Traced(
        config,
        strands.op_graphs,
        costs,
        memory_limits(config.plan, held),
        held,
    )


def graphs_of(traced: Traced) -> dict[str, Any]:
    """Of each strand and of all together: the product's digest, a hash of our own over everything
    that the graph says, and sizes for people."""
    named = {STRANDS[name]: graph for name, graph in traced.graphs.items()}
    return {
        name: _graph(graph) for name, graph in {**named, "all": whole_graph(traced.graphs)}.items()
    }


def plans_of(traced: Traced) -> tuple[dict[str, Any], str]:
    """One strand, and two strands by every search: orders, predictions and peaks of memory. And
    the plan file of two strands by `merge` for training, empty for a single micro-batch."""
    plans = {"one strand": _figures(traced, sequential(traced.graphs))}
    text = ""
    if traced.config.train.micro_batches > 1:
        for name, search in SEARCHES.items():
            plan = make_plan(traced.graphs, traced.costs, search, limits=traced.limits)
            plans[f"two strands, {name}"] = _figures(traced, plan)
            text = to_text(plan, traced.graphs) if name == "exact" else text
    return plans | {"constant bytes": dict(traced.constant)}, text


def train(run_file: str, settings: Mapping[str, str]) -> None:
    """Train as this rank, as `interlace train` does; metrics go to the run's output directory."""
    main(load_run_config(run_file, settings))


def losses_of(directory: str) -> dict[str, list[str]]:
    """The losses that a run wrote there, as hex floats: of each step and of evaluations, and the
    norms of the gradients before clipping."""
    with open(os.path.join(directory, "metrics.jsonl"), encoding="utf-8") as file:
        events = [json.loads(line) for line in file]
    steps = [event for event in events if event["event"] == "step"]
    held_out = [event for event in events if event["event"] == "evaluate"]
    return {
        "losses": [float(event["loss"]).hex() for event in steps],
        "gradient norms": [float(event["grad_norm"]).hex() for event in steps],
        "held out": [float(event["loss"]).hex() for event in held_out],
    }


def _graph(graph: OpGraph) -> dict[str, Any]:
    def sizes(op: Operator) -> list[int]:
        return [op.bytes_in, op.bytes_out, op.flops]

    operators = [
        [op.id, op.kind, op.target, op.lane, op.inputs, op.reads, op.key, *sizes(op), op.writes]
        for op in graph.operators
    ]
    inputs = [[given.id, given.role, given.bytes] for given in graph.inputs]
    return {
        "digest": graph.digest,
        "content": hashed([operators, inputs, list(graph.outputs)]),
        "operators": len(operators),
        "collectives": len(graph.collectives),
    }


def _figures(traced: Traced, plan: Plan) -> dict[str, Any]:
    count = traced.config.train.micro_batches
    figures = plan_figures(plan, traced.graphs, traced.costs, count)
    names = recorded_names(plan)
    phases = {
        names[name]: {
            "operators": len(phase_graph(name, traced.graphs, plan.head).operators),
            "order": hashed(list(phase.order)),
            "barriers": [len(phase.barriers), hashed(list(phase.barriers))],
            "predicted_ns": phase.predicted_ns,
            "exposed_ns": phase.exposed_ns,
            "simulated_ns": figures.phases[name].predicted_ns,
            "bound_ns": figures.phases[name].bound_ns,
            "peak_bytes": figures.phases[name].peak_bytes,
        }
        for name, phase in plan.phases.items()
    }
    derived = {new: old for new, old in names.items() if new not in plan.phases}
    actions = find(plan.schedule).actions(count, traced.graphs, head=bool(plan.head))
    return {
        "ahead": plan.head,
        "phases": phases,
        "derived": {old: hashed(list(plan.needed(new).order)) for new, old in derived.items()},
        "step": {
            "phases": [f"{names[action.phase]} {_numbers(action)}" for action in actions],
            "spans": _spans(simulate_step(plan, traced.graphs, traced.costs, count)),
            "predicted_ns": figures.step.predicted_ns,
            "exposed_ns": figures.step.exposed_ns,
            "communication_ns": figures.step.communication_ns,
            "bound_ns": figures.step.bound_ns,
            "peak_bytes": figures.step.peak_bytes,
        },
    }


def recorded_names(plan: Plan) -> dict[str, str]:
    """What the record calls each phase of a plan, and the one that follows from another: when it
    was made, phases were `forward`, `pair`, `last` and `backward`, and with one strand `again` and
    `before` for the micro-batches that run by other graphs than the first and the last."""
    found: dict[str, str] = {}
    for name in plan.phases:
        directions = {each.direction for each in strands_of(name)}
        if len(directions) == 2:
            found[name] = "pair"
            if without_heads(name) != name:
                found[without_heads(name)] = "last"
            continue
        rivals = [n for n in plan.phases if {e.direction for e in strands_of(n)} == directions]
        is_middle = len(rivals) > 1 and name in ("forward", "backward")
        forward = Direction.FORWARD in directions
        found[name] = ("again" if forward else "before") if is_middle else str(*directions)
    return found


def _numbers(action: Action) -> str:
    """The micro-batches of an action that go forward and backward, 0 for none."""
    of = {
        slot.strand.direction: slot.micro_batch
        for slot in action.slots
        if slot.strand.share != Share.HEAD
    }
    return f"{of.get(Direction.FORWARD, 0)} {of.get(Direction.BACKWARD, 0)}"


def _spans(timeline: Timeline) -> str:
    """A hash of every span of a timeline but for the names of strands."""

    def times(span: Span) -> list[int]:
        return [span.start_ns, span.end_ns, span.issue_ns, span.micro_batch, span.bytes]

    return hashed(sorted([span.name, span.lane, *times(span)] for span in timeline.spans))


def hashed(value: Sequence[Any]) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
