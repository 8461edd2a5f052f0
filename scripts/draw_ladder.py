"""Draw docs/pictures/ladder.png: speed-up by communication / compute, planned and measured.

    python scripts/draw_ladder.py            # two minutes: six plans of four layers of Llama 70B

Planned is what `interlace plan` says of 8 tensor-parallel ranks whose link gets slower; measured
are the rows of bench/results/cpu/strands.json (two ranks on CPU). The line is the most that any
order reaches if all communication lies beside compute: (1 + r) / max(1, r).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "ladder.png"
RECORD = ROOT / "bench" / "results" / "cpu" / "strands.json"
RATES_GBIT = (1600, 800, 400, 200, 100, 50)
RUN = (
    *("llama-70b", "--parallel.tensor", "8", "--model.kv_heads", "8", "--model.layers", "4"),
    *("--link.rate", "{rate}gbit"),
)


def planned(rate_gbit: int) -> dict[str, float]:
    """A step over a link of this rate, in ms; `ratio` is communication over compute."""
    words = [word.format(rate=rate_gbit) for word in RUN]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "interlace", "plan", *words, "--json", str(file)]
        subprocess.run([*command, "-o", f"{folder}/plan.txt"], check=True, capture_output=True)
        document = json.loads(file.read_text())
    one = document["one_strand"]["step"]
    two = document["searches"]["merge"]["step"]
    return {
        "ratio": one["communication_ns"] / (one["predicted_ns"] - one["exposed_ns"]),
        "waits": one["exposed_ns"] / one["predicted_ns"],
        "one": one["predicted_ns"] / 1e6,
        "two": two["predicted_ns"] / 1e6,
        "hidden": two["hidden_fraction"],
    }


def measured() -> list[tuple[float, float]]:
    """Communication over compute, and one strand's time over that of two, of the record."""
    cases: dict[str, dict[str, float]] = {}
    for row in json.loads(RECORD.read_text())["rows"]:
        if row["metric"] == "communication_over_compute":
            cases.setdefault(row["case"], {})["ratio"] = row["ours"]
        if row["metric"] == "speedup_vs_one_strand":
            cases.setdefault(row["case"], {})["gain"] = row["ratio"]
    return [(case["ratio"], case["gain"]) for case in cases.values()]


def draw(plans: list[dict[str, float]], path: Path) -> None:
    """The picture of the page `Will it help me?`."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    ratios = [0.1 * 1.06**step for step in range(80)]
    most = [(1 + ratio) / max(1.0, ratio) for ratio in ratios]
    axes.plot(ratios, most, color="0.6", label="everything beside compute (the most there is)")
    x, y = [each["ratio"] for each in plans], [each["one"] / each["two"] for each in plans]
    axes.plot(x, y, "o-", color="#1f77b4", label="planned: Llama 70B on 8 ranks, 50 to 1600 Gbit/s")
    axes.plot(*zip(*measured(), strict=True), "s", color="#d62728", label="measured: 2 ranks, CPU")
    axes.set(
        xscale="log",
        xlabel="communication / compute of one strand",
        ylabel="one strand / two strands",
        ylim=(1, 2.1),
        xticks=(0.1, 0.2, 0.5, 1, 2, 5, 10),
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    for at, words in ((0.12, "compute-bound"), (0.75, "balanced"), (4.0, "link-bound")):
        axes.text(at, 1.03, words, color="0.4")
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Plan, print the rows of the page's table, draw."""
    plans = []
    for rate in RATES_GBIT:
        each = planned(rate)
        plans.append(each)
        print(
            f"| {rate} Gbit/s | {each['ratio']:.2f} | {each['waits']:.0%} | {each['one']:,.0f} | "
            f"{each['two']:,.0f} | {each['one'] / each['two']:.2f} | {each['hidden']:.0%} |",
            flush=True,
        )
    draw(plans, PICTURE)


if __name__ == "__main__":
    main()
