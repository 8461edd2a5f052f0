"""Writes run directories like those of `interlace train`, for the tests of the report.

The timelines come from list scheduling made-up operators of a small Llama on one compute lane and
one link, so that waits, queues and overlaps are consistent with each other.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from interlace.ir import store
from interlace.ir.timeline import WAIT, Span, Timeline

LINK = "emulated link 250 Mbit/s, 50 us"
MS = 1_000_000
ISSUE_NS = 20_000


@dataclass(frozen=True)
class _Op:
    name: str
    kind: str
    duration_ns: int
    after: str = ""
    """The collective whose result it needs."""
    bytes: int = 0


def _block(layer: int, part: str, *, compute: list[tuple[str, float]], size: int) -> list[_Op]:
    gather, scatter = f"{part}{layer}_gather", f"{part}{layer}_scatter"
    link_ns = int(50_000 + size * 8 / 0.250)
    ops = [
        _Op(f"{part}{layer}_norm", "elementwise", 300_000),
        _Op(gather, "all_gather", link_ns, bytes=size),
    ]
    for index, (kind, ms) in enumerate(compute):
        after = gather if index == 0 else ""
        ops.append(_Op(f"{part}{layer}_{kind}_{index}", kind, int(ms * MS), after))
    ops.append(_Op(scatter, "reduce_scatter", link_ns, bytes=size))
    ops.append(_Op(f"{part}{layer}_add", "elementwise", 200_000, scatter))
    return ops


def _strand(layers: int, *, backward: bool) -> list[_Op]:
    scale = 2.0 if backward else 1.0
    attention = [("matmul", 3.0 * scale), ("attention", 1.5 * scale), ("matmul", 1.0 * scale)]
    ffn = [("matmul", 4.0 * scale), ("elementwise", 0.5 * scale), ("matmul", 2.0 * scale)]
    size = 65_536
    ops = [_Op("embedding", "embedding", 500_000)]
    for layer in range(layers):
        ops += _block(layer, "attn", compute=attention, size=size)
        ops += _block(layer, "ffn", compute=ffn, size=size)
        if backward:
            ops.append(_Op(f"accumulate{layer}", "accumulate", 400_000))
    return ops


class _Machine:
    """One compute lane that issues in order, one link that serves in order."""

    def __init__(self, *, blocking: bool) -> None:
        self.now = self.link_free = 0
        self.blocking = blocking
        self.spans: list[Span] = []

    def _collective(self, op: _Op, strand: str, micro_batch: int) -> int:
        start = max(self.now, self.link_free)
        end = self.link_free = start + op.duration_ns
        self.spans.append(
            Span(
                op.name,
                op.kind,
                "tensor",
                start,
                end,
                strand=strand,
                micro_batch=micro_batch,
                issue_ns=self.now,
                bytes=op.bytes,
            )
        )
        issued = self.now + ISSUE_NS
        self.spans.append(replace(self.spans[-1], lane="compute", start_ns=self.now, end_ns=issued))
        self.now = issued
        return end

    def _wait(self, name: str, until: int, strand: str, micro_batch: int) -> None:
        if until > self.now:
            span = Span(
                name, WAIT, "compute", self.now, until, strand=strand, micro_batch=micro_batch
            )
            self.spans.append(span)
            self.now = until

    def run(self, strands: dict[tuple[str, int], list[_Op]]) -> None:
        """Stay on a strand until it would wait, then go on with the one that is ready first."""
        queues = {key: list(ops) for key, ops in strands.items()}
        ends: dict[tuple[str, int, str], int] = {}

        def ready(key: tuple[str, int]) -> int:
            after = queues[key][0].after
            return max(self.now, ends[*key, after] if after else 0)

        key = next(iter(strands))
        while any(queues.values()):
            left = [key for key, ops in queues.items() if ops]
            key = min(left, key=lambda other, stay=key: (ready(other), other != stay))
            start, op = ready(key), queues[key].pop(0)
            if op.bytes:
                ends[*key, op.name] = self._collective(op, *key)
                if self.blocking:
                    self._wait(op.name, ends[*key, op.name], *key)
                continue
            self._wait(op.after, start, *key)
            self.spans.append(
                Span(
                    op.name,
                    op.kind,
                    "compute",
                    self.now,
                    self.now + op.duration_ns,
                    strand=key[0],
                    micro_batch=key[1],
                )
            )
            self.now += op.duration_ns


def make_timeline(mode: str, *, rank: int = 0, micro_batches: int = 8, layers: int = 4) -> Timeline:
    """The timeline of one step under `mode` (eager, 1 or 2)."""
    machine = _Machine(blocking=mode == "eager")
    forward = _strand(layers, backward=False)
    backward = _strand(layers, backward=True)
    if mode == "2":
        machine.run({("forward", 1): forward})
        for m in range(2, micro_batches + 1):
            machine.run({("forward", m): forward, ("backward", m - 1): backward})
        machine.run({("backward", micro_batches): backward})
    else:
        for m in range(1, micro_batches + 1):
            machine.run({("forward", m): forward})
            machine.run({("backward", m): backward})
    machine.now = max(machine.now, machine.link_free)
    machine.spans.append(Span("adamw", "other", "compute", machine.now, machine.now + 15 * MS))
    return Timeline(mode, rank, tuple(machine.spans))


def make_comparison(timelines: dict[str, Timeline], *, steps: int = 10) -> dict:
    """What `interlace train` writes to comparison.json."""
    modes: dict[str, dict[str, Any]] = {}
    for mode, timeline in timelines.items():
        base = timeline.length_ns / MS
        step_ms = [base * (1 + 0.01 * (i % 5 - 1)) for i in range(steps)]
        losses = [5.5 - 0.1 * i + (1e-7 if mode == "eager" else 0.0) for i in range(steps)]
        modes[mode] = {
            "step_ms": step_ms,
            "cpu_ms": [0.75 * ms if mode == "eager" else 0.6 * ms for ms in step_ms],
            "losses": losses,
            "loss_bits": [loss.hex() for loss in losses],
            "exposed_ms": timeline.exposed_ns() / MS,
            "communication_ms": timeline.communication_ns() / MS,
            "hidden_fraction": timeline.hidden_fraction(),
        }
    middle = {mode: median(values["step_ms"]) for mode, values in modes.items()}
    comparison = {
        "steps": steps,
        "micro_batches": 8,
        "link": LINK,
        "modes": modes,
        "losses_identical": True,
        "max_relative_difference_to_eager": 2.1e-8,
    }
    for key, mode in (("speedup_vs_eager", "eager"), ("speedup_vs_one_strand", "1")):
        if mode in middle and "2" in middle:
            ratio = middle[mode] / middle["2"]
            comparison[key] = {"median": ratio, "min": ratio * 0.97, "max": ratio * 1.02}
    return comparison


def _metrics(steps: int) -> list[dict]:
    events = []
    for step in range(1, steps + 1):
        bits = 3.0 + 5.0 * (1 - step / steps) ** 3 + 0.1 * ((step * 7919) % 13 - 6) / 6
        values = {"loss": bits * 0.6931, "bits_per_byte": bits, "step_ms": 540 + step % 9}
        rest = {"tokens_per_s": 7600 - step % 50, "lr": 1e-3, "grad_norm": 0.9}
        events.append({"event": "step", "step": step, **values, **rest})
        if step % 50 == 0:
            events.append(
                {"event": "evaluate", "step": step, "loss": bits, "bits_per_byte": bits + 0.05}
            )
    return events


def write_run(
    directory: Path,
    *,
    modes: tuple[str, ...] = ("eager", "1", "2"),
    ranks: int = 2,
    timeline: Callable[..., Timeline] = make_timeline,
    steps: int = 150,
    text: str = "stdlib",
) -> dict[str, Timeline]:
    """Fill `directory` as a finished run does; returns rank 0's timelines by mode."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.toml").write_text(
        f"strands = '2'\n[data]\npath = {json.dumps(text)}\n[train]\nsteps = {steps}\n"
        "micro_batches = 8\n[compare]\nmodes = ['eager', '1', '2']\n"
    )
    environment = {
        "interlace": "0.1.0",
        "torch": "2.13.0+cpu",
        "python": "3.11.7",
        "machine": "Linux x86_64, 2 cores",
        "device": "cpu",
        "world_size": ranks,
        "seed": 1,
        "link": LINK,
        "started": "2026-05-09T07:35:25+00:00",
        "command": f"interlace train demo.toml --data.path {text}",
    }
    (directory / "environment.json").write_text(json.dumps(environment))
    lines = [json.dumps(event) for event in _metrics(steps)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "plan.txt").write_text(
        "interlace plan 1\nsearch list  graph aa  costs bb\n\n"
        "phase pair  operators 2  predicted_ns 100  exposed_ns 10\n"
        "  compute | tensor\n  forward.mm_1 |\n           | backward.all_gather_1\n"
    )
    first: dict[str, Timeline] = {}
    for mode in modes:
        for rank in range(ranks):
            made = timeline(mode, rank=rank)
            store.save(made, directory / "timelines" / f"{mode}-rank{rank}.json")
            first.setdefault(mode, made)
    if first:
        (directory / "comparison.json").write_text(json.dumps(make_comparison(first)))
    return first
