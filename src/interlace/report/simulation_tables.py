"""A simulated step as people read it, as JSON and as a Chrome trace."""

import json
from collections.abc import Mapping
from typing import Any

from interlace.ir.timeline import Timeline
from interlace.report.chrome import trace_events, trace_gz
from interlace.strategy.chunk_cuts import split_names
from interlace.strategy.expected_error import expected_error
from interlace.strategy.rank_memory import MemoryParts
from interlace.strategy.simulated_job import SimulatedJob
from interlace.strategy.varied_step import VariedStep
from interlace.text import aligned, number, percent

_GIB = 2**30
_RANK_HEADER = ("stage", "ranks", "layers", "compute s", "waits s", "memory GiB")
_LANE_HEADER = ("lane", "busy s", "exposed s", "hidden")


def simulation_summary(found: SimulatedJob, varied: Mapping[str, VariedStep] | None = None) -> str:
    """The step in one line, its communication by lane, its stages, memory, and how sure it is.
    `varied`: what else it takes, by what varies."""
    layout = found.layout
    lines = [
        f"{model_line(found)}, on {layout.ranks} ranks of {found.cluster.name}: {layout.text}",
        f"schedule {layout.schedule}, {layout.micro_batches} micro-batches of {layout.micro_batch} "
        f"x {found.job.sequence} tokens on each of {layout.replicas} replicas, recompute "
        f"{layout.recompute}",
        "",
        f"step {seconds_text(found.seconds)} s, {found.tokens_per_s:,.0f} tokens/s, MFU "
        f"{percent(found.mfu)}, HFU {percent(found.hfu)}",
        f"waiting for other stages {percent(found.bubble)} of all ranks' time; ends of the step "
        f"{percent(found.ends_s / found.seconds)}",
        *(
            f"{what}: step {seconds_text(each.seconds)} s, {percent(each.more)} longer"
            for what, each in (varied or {}).items()
        ),
        "",
        _lanes(found),
        "",
        _stages(found),
        "",
        f"memory of the rank that needs most: {memory_line(found.peak)}",
    ]
    if not found.fits:
        lines.append(
            f"it does not fit: a device of {found.cluster.name} has "
            f"{found.cluster.memory_gib:.1f} GiB"
        )
    lines.append(expected_error(found.cluster, found.layout.schedule).text)
    return "\n".join(lines)


def model_line(found: SimulatedJob) -> str:
    """`llama, 70.6B parameters`, of experts also those for a token and how even they are."""
    job = found.job
    said = f"{found.config.model.architecture}, {_billions(job.parameters)} parameters"
    if (experts := job.experts) is None:
        return said
    active = job.parameters - job.layers * (
        experts.parameters(job.hidden) * (experts.count - experts.chosen) // experts.count
    )
    load = (
        "experts balanced"
        if experts.load == 1
        else f"the fullest expert with {experts.load:g} x its share"
    )
    return f"{said} ({_billions(active)} for a token), {load}"


def _billions(size: int) -> str:
    return f"{size / 1e9:.1f}B" if size >= 1e9 else f"{size / 1e6:.1f}M"


def seconds_text(value: float) -> str:
    """With three digits also where it is milliseconds."""
    return f"{value:.3g}" if 0 < value < 0.1 else number(value)


def memory_line(parts: MemoryParts) -> str:
    """`71.0 GiB (weights 2.2, masters 4.5, ...)`."""
    named = ", ".join(f"{n} {b / _GIB:.1f}" for n, b in parts.parts().items() if b > 0)
    return f"{parts.total / _GIB:.1f} GiB ({named})"


def simulation_data(
    found: SimulatedJob, varied: Mapping[str, VariedStep] | None = None
) -> dict[str, Any]:
    """The same for a JSON file."""
    layout = found.layout
    return {
        "cluster": found.cluster.name,
        "ranks": layout.ranks,
        "layout": {name: getattr(layout, name) for name in layout.__slots__},
        "split_at": list(split_names(found.cuts)),
        "step_s": found.seconds,
        "tokens_per_s": found.tokens_per_s,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "bubble": found.bubble,
        "ends_s": found.ends_s,
        "exposed_s": dict(found.exposed_s),
        "communication_s": dict(found.communication_s),
        "memory_bytes": [each.parts() | {"total": each.total} for each in found.memory],
        "fits": found.fits,
        "expected_error": expected_error(found.cluster, layout.schedule).share,
        "varied_step_s": {what: each.seconds for what, each in (varied or {}).items()},
    }


def trace_bytes(found: SimulatedJob, *, compressed: bool) -> bytes:
    """A Chrome trace: a process for one rank of each stage, and one for each kind of action with
    its operators."""
    timelines: dict[str, Mapping[int, Timeline]] = {
        "simulated": {timeline.rank: timeline for timeline in found.step.timelines}
    }
    for name, timeline in found.phases.items():
        timelines[f"operators of {name}"] = {0: timeline}
    if compressed:
        return trace_gz(timelines)
    text = {"traceEvents": list(trace_events(timelines)), "displayTimeUnit": "ms"}
    return json.dumps(text, separators=(",", ":")).encode()


def _lanes(found: SimulatedJob) -> str:
    rows = []
    for lane, busy in found.communication_s.items():
        if busy > 0:
            exposed = found.exposed_s.get(lane, 0.0)
            hidden = percent(max(0.0, 1 - exposed / busy))
            rows.append((lane, seconds_text(busy), seconds_text(exposed), hidden))
    if not rows:
        return "no collectives"
    return aligned(_LANE_HEADER, rows, text_columns=1)


def _stages(found: SimulatedJob) -> str:
    layout, step = found.layout, found.step
    each = layout.ranks // layout.pipeline
    layers = [0] * layout.pipeline
    ends = (*found.cuts[1:], found.job.layers)
    for begin, end, rank in zip(found.cuts, ends, found.rank_of, strict=True):
        layers[rank] += end - begin
    rows = [
        (
            str(stage),
            f"{stage * each} to {(stage + 1) * each - 1}",
            str(layers[stage]),
            seconds_text((step.step_ns - bubble) / 1e9),
            seconds_text(bubble / 1e9),
            f"{found.memory[stage].total / _GIB:.1f}",
        )
        for stage, bubble in enumerate(step.bubble_ns)
    ]
    return aligned(_RANK_HEADER, rows, text_columns=2)
