"""Measure every operator and every collective of a chunk alone, on the real machine.

The forward and the backward graph run one after the other with real data, each collective
waited for at once, so that nothing overlaps. Ranks then agree on the mean of all ranks, for a
collective from its issue to its end. A rank that is early sees its own waiting in that, so what
ranks lose by not being in step is part of a collective's time, and the sum is that of a real step
(with the fastest rank's times predictions were 3 to 5 % short).
"""

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean, quantiles

import torch

from interlace.ir.costs import CostTable, cost_of
from interlace.ir.graph import OpGraph
from interlace.ir.timeline import WAIT, Timeline
from interlace.ranks.small_collectives import agree, average

WARM_UP = 2
OUTLIERS = 0.1
"""Share of the samples dropped at either end."""


def machine_id(device_type: str, link: str) -> str:
    """What measured times are valid for: processor or GPU, threads, torch, link."""
    name = torch.cuda.get_device_name() if device_type == "cuda" else processor_name()
    parts = (name, str(torch.get_num_threads()), str(torch.__version__), link)
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def processor_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def typical(samples: Sequence[float]) -> float:
    """Mean without the tenth at either end (at least one sample each, from three samples on).

    A step is a sum of times, so of skewed times, as transfers of gloo are, the mean predicts it
    and the median is too short (seen: mean 14.6 ms, median 13.9 ms).
    """
    ordered = sorted(samples)
    drop = ceil(OUTLIERS * len(ordered)) if len(ordered) > 2 else 0
    return fmean(ordered[drop : len(ordered) - drop])


def spread(samples: Sequence[float]) -> float:
    """Interquartile range."""
    if len(samples) < 2:
        return 0.0
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return high - low


def measure(
    run_once: Callable[[], Timeline],
    graphs: Mapping[str, OpGraph],
    *,
    repeats: int,
    machine: str,
    graph_digest: str,
) -> CostTable:
    """The times alone of `graphs`, by strand name. `run_once` runs both graphs, recorded.

    Collective on all ranks of the default group; every rank returns the same table.
    """
    samples: dict[str, list[int]] = {}
    issues: list[int] = []
    for repeat in range(WARM_UP + repeats):
        timeline = run_once()
        if repeat < WARM_UP:
            continue
        for span in timeline.spans:
            if span.kind == WAIT or span.name not in graphs[span.strand].by_id:
                continue
            op = graphs[span.strand].by_id[span.name]
            if span.lane != op.lane:
                issues.append(span.duration_ns)
            else:
                samples.setdefault(op.key, []).append(
                    span.end_ns - (span.issue_ns if op.is_collective else span.start_ns)
                )
    operators = {op.key: op for graph in graphs.values() for op in graph.operators}
    solo = average({key: typical(values) for key, values in samples.items()})
    spreads = agree({key: spread(values) for key, values in samples.items()})
    issue = average({"issue": typical(issues) if issues else 0})["issue"]
    return CostTable(
        operators={key: cost_of(operators[key], solo[key], spreads[key]) for key in solo},
        source="profile",
        issue_ns=issue,
        graph_digest=graph_digest,
        machine=machine,
    )
