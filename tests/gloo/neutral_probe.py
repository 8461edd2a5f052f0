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
from interlace.ir.costs import CostTable
from interlace.ir.graph import Operator, OpGraph
from interlace.ir.phases import derived_orders, pair_graph, phase_graphs, phases_of_step
from interlace.ir.plan import Plan, sequential, to_text
from interlace.ir.timeline import Span, Timeline
from interlace.report.plan_figures import plan_figures
from interlace.rules import check
from interlace.search.limits import MemoryLimits
from interlace.search.planner import make_plan
from interlace.sim.step import simulate_step
from interlace.train.memory import constant_bytes, memory_limits
from interlace.train.planning import computed_costs, trace_fake
from interlace.train.worker import main

SEARCHES = {"exact": "exact", "list": "list", "paper": "paper"}
"""Name in the record: name in the package."""
PHASES = {
    "forward": "forward",
    "pair": "pair",
    "last": "last",
    "backward": "backward",
    "again": "again",
    "before": "before",
}
"""Name of a phase in the package: name in the record."""
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
    return Traced(
        config,
        strands.op_graphs,
        costs,
        memory_limits(config, strands.module, strands.data),
        constant_bytes(config, strands.module, strands.data),
    )


def graphs_of(traced: Traced) -> dict[str, Any]:
    """Of each strand and of all together: the product's digest, a hash of our own over everything
    that the graph says, and sizes for people."""
    named = {STRANDS[name]: graph for name, graph in traced.graphs.items()}
    return {
        name: _graph(graph) for name, graph in {**named, "all": pair_graph(traced.graphs)}.items()
    }


def plans_of(traced: Traced) -> tuple[dict[str, Any], str]:
    """One strand, and two strands by every search: orders, predictions and peaks of memory. And
    the plan file of two strands by `exact` for training, empty for a single micro-batch."""
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
    of_phase = phase_graphs(traced.graphs, plan.ahead)
    phases = {
        PHASES[name]: {
            "operators": len(of_phase[name].operators),
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
    planned = {name: phase.order for name, phase in plan.phases.items()}
    derived = derived_orders(planned)
    steps = phases_of_step({**planned, **derived}, count)
    return {
        "ahead": plan.ahead,
        "phases": phases,
        "derived": {PHASES[name]: hashed(list(order)) for name, order in derived.items()},
        "step": {
            "phases": [f"{PHASES[name]} {one} {other}" for name, one, other in steps],
            "spans": _spans(simulate_step(plan, traced.graphs, traced.costs, count)),
            "predicted_ns": figures.step.predicted_ns,
            "exposed_ns": figures.step.exposed_ns,
            "communication_ns": figures.step.communication_ns,
            "bound_ns": figures.step.bound_ns,
            "peak_bytes": figures.step.peak_bytes,
        },
    }


def _spans(timeline: Timeline) -> str:
    """A hash of every span of a timeline but for the names of strands."""

    def times(span: Span) -> list[int]:
        return [span.start_ns, span.end_ns, span.issue_ns, span.micro_batch, span.bytes]

    return hashed(sorted([span.name, span.lane, *times(span)] for span in timeline.spans))


def hashed(value: Sequence[Any]) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
