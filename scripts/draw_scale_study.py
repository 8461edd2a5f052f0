"""Draw what scripts/scale_study.py found, and print it as tables for docs/concepts/at-scale.md.

python scripts/draw_scale_study.py --model llama-3.1-405b
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from interlace.report.theme import LIGHT
from interlace.strategy.goodput import Failures, goodput

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
PARTS = (
    ("waits for tensor ranks", "#2f6fd0", ("tp",)),
    ("waits for experts", "#7a4fc2", ("ep", "ep_counts")),
    ("waits for context ranks", "#c2448f", ("cp",)),
    (
        "waits for replicas",
        "#12918a",
        ("dp_shard", "dp_replicate", "ep_dp_shard", "ep_dp_replicate"),
    ),
)
BUBBLE = ("waits for other stages", "#e08a1e")
QUICK, SLOW = Failures(), Failures(detect_s=1800, restart_s=300)
"""Seconds until a job runs again, and what a timeout of half an hour leaves."""
SCHEDULES = {
    "eager_one_f_one_b": ("eager 1F1B", "#8a8f98"),
    "zb_h1": ("zero bubble H1", "#e08a1e"),
    "interleaved(chunks=2)": ("interleaved, 2 chunks", "#2f6fd0"),
    "zb_v": ("zero bubble V", "#c2448f"),
    "folded": ("folded, two strands", "#12918a"),
    "dual_pipe_v": ("DualPipeV, two strands", "#1b7f3b"),
    "stp": ("STP, two strands", "#7a4fc2"),
}


def main() -> int:
    """Write the pictures, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-405b")
    model = parser.parse_args().model
    path = ROOT / "bench" / "results" / "scale" / f"{model}.json"
    rows = [row for row in json.loads(path.read_text())["rows"] if "chosen" in row]
    for name, draw in (("waits", draw_waits), ("schedules", draw_schedules), ("goodput", draw_mfu)):
        figure = Figure(figsize=(11, 4.6), dpi=130, facecolor=LIGHT.background)
        figure.set_layout_engine("constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, scaling in zip(panels, ("weak", "strong"), strict=True):
            some = [row for row in rows if row["scaling"] == scaling]
            draw(axes, some)
            _label(axes, some, scaling)
        panels[1].set_ylabel("")
        shown = {}
        for axes in panels:  # what waits at some size only is named too
            handles, names = axes.get_legend_handles_labels()
            shown |= {name: h for name, h in zip(names, handles, strict=True) if name not in shown}
        panels[1].legend(shown.values(), shown.keys(), frameon=False, fontsize=8, loc="best")
        file = PICTURES / f"at-scale-{name}-{model}.png"
        FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})
        print(file)
    for scaling in ("weak", "strong"):
        some = [row for row in rows if row["scaling"] == scaling]
        for table in (layout_table, schedule_table, technique_table, goodput_table):
            print(f"\n{scaling}\n\n" + "\n".join(table(some)))
    return 0


def draw_waits(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Two stacked bars for each size: the best layout of one strand, and that of two."""
    seen: set[str] = set()
    for at, row in enumerate(rows):
        for side, which in ((-0.2, "one"), (0.2, "two")):
            if row[which] is None:
                continue
            bottom = 0.0
            for name, hue, share in _shares(row[which]):
                label = name if name not in seen and share > 0 else None
                seen |= {name} if share > 0 else set()
                light = 1.0 if which == "one" else 0.55
                axes.bar(at + side, 100 * share, 0.36, bottom, color=hue, alpha=light, label=label)
                bottom += 100 * share
    axes.set_ylabel("share of the step, %   (left bar: one strand, right: two)", fontsize=9)


def _shares(job: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    for name, hue, lanes in PARTS:
        yield name, hue, sum(job["exposed"].get(lane, 0.0) for lane in lanes)
    yield *BUBBLE, job["bubble"]


def draw_schedules(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Gain of each schedule over 1F1B, on the split of the best layout of one strand."""
    for name, (label, hue) in SCHEDULES.items():
        points = [(at, _gain(row, name)) for at, row in enumerate(rows)]
        known = [(at, 100 * gain) for at, gain in points if gain is not None]
        if known:
            axes.plot(*zip(*known, strict=True), "-", color=hue, label=label, linewidth=1.5)
        for at, gain in known:
            fits = rows[at]["schedules"][name]["fits"]
            axes.plot([at], [gain], "o", color=hue, markerfacecolor=hue if fits else "white")
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_ylabel("faster than 1F1B, %   (hollow: needs too much memory)", fontsize=9)


def _gain(row: dict[str, Any], name: str) -> float | None:
    plain = row["schedules"].get("one_f_one_b", {})
    other = row["schedules"].get(name, {})
    if "seconds" not in plain or "seconds" not in other:
        return None
    return plain["seconds"] / other["seconds"] - 1


def draw_mfu(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """MFU of the best layout, and what failures leave of it."""
    mfu = [100 * row["chosen"]["mfu"] for row in rows]
    axes.plot(range(len(rows)), mfu, "o-", color=LIGHT.text, label="MFU of a step")
    for label, failures, hue in (
        ("with failures, runs again after 65 s", QUICK, "#12918a"),
        ("with failures, runs again after 35 minutes", SLOW, "#d62728"),
    ):
        left = [goodput(row["devices"], failures).share for row in rows]
        axes.plot(
            range(len(rows)),
            [m * g for m, g in zip(mfu, left, strict=True)],
            "s--",
            color=hue,
            label=label,
        )
    axes.set_ylim(0, 50)
    axes.set_ylabel("% of the devices' peak", fontsize=9)


def _label(axes: Axes, rows: Sequence[dict[str, Any]], scaling: str) -> None:
    batch = "grows with the devices" if scaling == "weak" else f"of {rows[0]['batch']:,} sequences"
    axes.set_title(f"{scaling} scaling: batch {batch}", fontsize=10, color=LIGHT.text)
    axes.set_xticks(range(len(rows)), [_short(row["devices"]) for row in rows], fontsize=8)
    axes.set_xlabel("devices", fontsize=9)
    axes.grid(axis="y", color=LIGHT.grid, linewidth=0.6)
    axes.set_axisbelow(True)


def _short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 else str(number)


def layout_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The best layout of each size."""
    yield (
        "| devices | batch | best layout | schedule | micro-batches | recompute | step s | MFU "
        "| bubble | exposed | GiB | gain of two strands |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        job = row["chosen"]
        exposed = sum(job["exposed"].values())
        yield (
            f"| {row['devices']:,} | {row['batch']:,} | {job['layout']} | {job['schedule']} "
            f"| {job['micro_batches']} x {job['micro_batch']} | {job['recompute']} "
            f"| {job['seconds']:.2f} | {100 * job['mfu']:.1f} % | {100 * job['bubble']:.0f} % "
            f"| {100 * exposed:.0f} % | {job['gib']:.0f} | {_percent(_of_two(row))} |"
        )


def _of_two(row: dict[str, Any]) -> float | None:
    one, two = row["one"], row["two"]
    return None if one is None or two is None else one["seconds"] / two["seconds"] - 1


def schedule_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Gains of schedules over 1F1B; in brackets those that need too much memory."""
    yield "| devices | " + " | ".join(label for label, _ in SCHEDULES.values()) + " |"
    yield "|---" * (1 + len(SCHEDULES)) + "|"
    for row in rows:
        cells = []
        for name in SCHEDULES:
            gain = _gain(row, name)
            fits = row["schedules"].get(name, {}).get("fits", True)
            cells.append(_percent(gain) if fits else f"({_percent(gain)})")
        yield f"| {row['devices']:,} | " + " | ".join(cells) + " |"


def technique_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the step takes longer without each technique of the best layout."""
    names = sorted({name.partition(" ")[0] for row in rows for name in row["without"]})
    yield "| devices | " + " | ".join(names) + " |"
    yield "|---" * (1 + len(names)) + "|"
    for row in rows:
        by_name = {name.partition(" ")[0]: change for name, change in row["without"].items()}
        cells = " | ".join(_percent(by_name.get(name)) for name in names)
        yield f"| {row['devices']:,} | {cells} |"


def goodput_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Failures, intervals, and what is left."""
    yield "| devices | a failure every | best interval | goodput, 65 s | goodput, 35 minutes |"
    yield "|---|---|---|---|---|"
    for row in rows:
        quick, slow = (goodput(row["devices"], each) for each in (QUICK, SLOW))
        yield (
            f"| {row['devices']:,} | {quick.mean_time_s / 3600:.1f} h | {quick.interval_s:.0f} s "
            f"| {100 * quick.share:.1f} % | {100 * slow.share:.1f} % |"
        )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
