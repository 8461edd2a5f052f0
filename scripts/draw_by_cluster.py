"""Draw docs/pictures/by-cluster.png: what two strands give by communication over compute.

    python scripts/draw_by_cluster.py        # a minute; prints the table of the docs

Simulates one step of Llama 3.1 8B and 70B with one strand and with two on each cluster: tensor
ranks within a host, eight replicas that share optimizer state (ZeRO-1), or weights too (ZeRO-3),
without a pipeline, 8 micro-batches of one sequence of 8,192 tokens. The line is the most that any
order reaches if all communication lies beside compute: (1 + r) / max(1, r).
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scale_study import config_of

from interlace.errors import InputError
from interlace.hardware.cluster import load_cluster
from interlace.report.theme import LIGHT
from interlace.strategy.job_layout import JobLayout
from interlace.strategy.simulated_job import parts_of, simulate_job

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "by-cluster.png"
CLUSTERS = {
    "a40": ("A40, PCIe", "#e08a1e"),
    "a100-80": ("A100", "#2f6fd0"),
    "a800": ("A800", "#c2448f"),
    "h100": ("H100", "#12918a"),
    "h800": ("H800", "#d62728"),
    "h200": ("H200", "#5d7f4e"),
    "b200": ("B200", "#7a4fc2"),
}
MODELS = ("llama-3.1-8b", "llama-3.1-70b")
REPLICAS, MICRO_BATCHES, SEQUENCE = 8, 8, 8192


@dataclass(frozen=True)
class Case:
    """One strand and two on one cluster."""

    cluster: str
    model: str
    tensor: int
    zero: Literal[1, 3]
    ratio: float
    """Communication over compute of one strand."""
    waits: float
    """Share of its step."""
    gain: float
    """Its step over that of two strands."""


def case(model: str, cluster: str, tensor: int, zero: Literal[1, 3]) -> Case | None:
    """Simulated; None where the layout cannot be."""
    config, on = config_of(model, SEQUENCE), load_cluster(cluster)
    layout = JobLayout(
        data_shard=REPLICAS,
        tensor=tensor,
        zero=zero,
        reduce="micro_batch" if zero == 3 else "step",
        micro_batches=MICRO_BATCHES,
    )
    try:
        parts = parts_of(config, on, layout)
    except InputError:
        return None
    one, two = (
        simulate_job(config, on, replace(layout, schedule=name), parts)
        for name in ("one_strand", "two_strand")
    )
    waits = sum(one.exposed_s.values())
    ratio = sum(one.communication_s.values()) / (one.seconds - waits)
    return Case(cluster, model, tensor, zero, ratio, waits / one.seconds, one.seconds / two.seconds)


def main() -> int:
    """Simulate all, draw, print."""
    layouts: tuple[tuple[int, Literal[1, 3]], ...] = ((1, 3), (2, 1), (4, 1), (8, 1))
    cases = [
        found
        for cluster in CLUSTERS
        for model in MODELS
        for tensor, zero in layouts
        if tensor <= load_cluster(cluster).devices_per_host
        and (found := case(model, cluster, tensor, zero)) is not None
    ]
    print("| cluster | model | layout | communication / compute | one strand waits | speed-up |")
    print("|---|---|---|---|---|---|")
    for each in cases:
        layout = f"tensor {each.tensor}" if each.zero == 1 else "ZeRO-3 over 8"
        print(
            f"| {CLUSTERS[each.cluster][0]} | {each.model} | {layout} | {each.ratio:.2f} "
            f"| {100 * each.waits:.0f} % | {each.gain:.2f} |"
        )
    draw(cases)
    print(PICTURE)
    return 0


def draw(cases: list[Case]) -> None:
    """Filled: tensor ranks; hollow: ZeRO-3. Larger for more tensor ranks."""
    figure = Figure(figsize=(8.2, 4.8), dpi=140, facecolor=LIGHT.background)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    ratios = [0.02 * 1.06**step for step in range(105)]
    most = [(1 + ratio) / max(1.0, ratio) for ratio in ratios]
    axes.plot(ratios, most, color="0.6", label="everything beside compute (the most there is)")
    for cluster, (label, hue) in CLUSTERS.items():
        for each in (found for found in cases if found.cluster == cluster):
            face = hue if each.zero == 1 else "none"
            size = 26 + 9 * each.tensor
            mark = "o" if each.model == MODELS[1] else "s"
            axes.scatter(each.ratio, each.gain, size, color=hue, facecolor=face, marker=mark)
        axes.scatter([], [], 40, color=hue, label=label)
    axes.set(
        xscale="log",
        xlabel="communication / compute of one strand",
        ylabel="one strand / two strands",
        xticks=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(color=LIGHT.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(
        "Simulated: squares Llama 3.1 8B, circles 70B; filled 2, 4, 8 tensor ranks (larger is "
        "more), hollow ZeRO-3 over 8 hosts",
        fontsize=8.5,
        loc="left",
        color=LIGHT.text,
    )
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    FigureCanvasAgg(figure).print_png(PICTURE, metadata={"Software": None})


if __name__ == "__main__":
    sys.exit(main())
