"""Experts under two strands against one strand, eager PyTorch, and the order fixed by hand.

Two ranks, one core each, share the experts of a Llama in float32 (dropless, top-2, SwiGLU) over a
link of a lab; then four ranks, for which there are too few cores, so that compute is emulated:
matmuls and attention sleep for their FLOPs, all else is real. Short runs of one strand say how
long compute and all-to-all take; from that follows the rate of the link at which they take equally
long with balanced routing. Other weights lie whole on all ranks, and their gradients are summed
once a step. Routing is balanced, or skewed by Zipf's law over experts, of which the first rank
holds the most popular ones. All ways take turns step by step in one run; a step is all
micro-batches and the sums over ranks, without the optimizer. The first step of each way is not
counted. All-to-alls run whole, but for two of the ways: in `groups` a step of one strand cuts each
into two, by groups of experts; in `both` only the first forward and the last backward do, and all
other passes are two strands. In each turn operators are timed again, for predictions.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from interlace.bench.moe_model import ROUTINGS, MoeSize
from interlace.bench.results import ResultRow, environment, speedup, write_json
from interlace.config import parse_rate
from interlace.errors import InputError, RunError
from interlace.lab import hosts

EAGER, ONE, TWO, FIXED = "eager", "one strand", "two strands", "fixed order"
"""Ways of running a step."""
GROUPS, BOTH = "groups", "both"
"""Ways in which exchanges are cut."""
WAYS = (EAGER, ONE, GROUPS, TWO, FIXED, BOTH)
"""In the order of their turns."""
EMULATED = "emulated compute"
"""What cases are called in which matmuls sleep."""
_RIVALS = {EAGER: "speedup_vs_eager", ONE: "speedup_vs_one_strand", FIXED: "speedup_vs_fixed_order"}
_OF = {"": "", "rows_": "_of_rows", "counts_": "_of_counts"}
"""Ends of metrics of what is hidden: of all exchanges, of rows, of counts of rows alone."""
CALIBRATION_RATE = "300mbit"
"""Rate of the link in the short run that says how long compute and all-to-all take."""
_FULL = MoeSize(
    layers=3, width=256, ffn_width=768, heads=4, experts=8, words=256, batch=2, length=192,
    micro_batches=48, repeats=3, recorded=3,
)  # fmt: skip
"""What the file of results was measured with. The first micro-batch's forward and the last one's
backward have nothing beside them, which made 1.5 points of the hidden share with 24."""
_FOUR = replace(_FULL, ranks=4, micro_batches=12, repeats=2, flops_per_s=5e10)
"""More ranks than cores, so compute is emulated."""
_QUICK = MoeSize(
    layers=1, width=64, ffn_width=64, heads=2, experts=4, words=64, batch=1, length=64,
    micro_batches=2, repeats=1, recorded=1, flops_per_s=1e9, routings=ROUTINGS[1:],
)  # fmt: skip
"""A smaller model, and one case: that all ways run."""


def run(*, quick: bool, json_path: Path | None) -> int:
    """Calibrate, measure, print the table; write JSON if asked."""
    from interlace.report.tables import bench_table  # noqa: PLC0415  rich

    if reason := "this is already a lab" if hosts.inside_lab() else hosts.available():
        raise InputError(
            f"no network namespaces here: {reason}", hint="run it as root on Linux, outside a lab"
        )
    rows: list[ResultRow] = []
    links = []
    for size in (_QUICK,) if quick else (_FULL, _FOUR):
        found = measure(size)
        links.append(f"{found['rate']} for {size.ranks} hosts")
        for routing, case in found["cases"].items():
            rows += rows_of(case_of(routing, size), case)
    print(bench_table([asdict(row) for row in rows]))
    if json_path is not None:
        write_json(json_path, "moe_strands", environment(f"lab links {', '.join(links)}"), rows)
        print(json_path)
    return 0


def case_of(routing: str, size: MoeSize) -> str:
    """`balanced`, or `balanced, 4 ranks, emulated compute`."""
    return f"{routing}, {size.ranks} ranks, {EMULATED}" if size.flops_per_s else routing


def rate_for(records: Sequence[Mapping[str, float]], rate: str) -> str:
    """The link rate at which all-to-alls take as long as compute, given how long both took one
    strand at `rate`. The time of a transfer goes with the inverse of the rate."""
    ratio = median(record["busy"] / record["compute"] for record in records)
    return f"{max(1, round(parse_rate(rate, 'rate') * ratio / 1e6))}mbit"


def measure(size: MoeSize) -> dict[str, Any]:
    """What one run of the ranks found: the rate of the link, and each case by routing. RunError
    when a rank fails."""
    with tempfile.TemporaryDirectory(prefix="interlace-moe-") as folder:
        told, result = Path(folder) / "job.json", Path(folder) / "found.json"
        told.write_text(json.dumps(asdict(size)), encoding="utf-8")
        command = [sys.executable, "-m", "interlace.bench.moe_world", str(told), str(result)]
        rate = CALIBRATION_RATE
        if code := hosts.run_in_lab(command, hosts=size.ranks, ranks_per_host=1, rate=rate):
            raise RunError(
                f"the ranks of the bench ended with exit code {code}",
                hint="the message of a rank is above",
            )
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def rows_of(routing: str, found: Mapping[str, Any]) -> list[ResultRow]:
    """The load, the ratio of times that was reached, two strands against every other way, what was
    hidden, and predictions."""
    times = {name: [each / 1e6 for each in own] for name, own in found["times"].items()}
    records, predicted = found["records"], found["predicted_ns"]
    rows = [
        _row(routing, "largest_over_mean_rows_of_expert", found["load"]["expert"], 1.0),
        _row(routing, "largest_over_mean_rows_of_rank", found["load"]["rank"], 1.0),
        _of_records(routing, "all_to_all_over_compute", records[ONE], "busy", "compute"),
        _row(
            routing, "counts_of_two_strands_ms", _counts_ms(records[TWO]), _counts_ms(records[ONE])
        ),
    ]
    rows += [
        speedup(routing, metric, times[TWO], times[rival])
        for rival, metric in _RIVALS.items()
        if rival in times
    ]
    rows += [
        speedup(routing, f"{way}_vs_{rival.replace(' ', '_')}", times[way], times[rival])
        for way, rival in ((GROUPS, ONE), (BOTH, TWO), (BOTH, EAGER))
        if way in times and rival in times
    ]
    for name, own in records.items():
        case = f"{routing}, {name}"
        parts = ("",) if name in (ONE, GROUPS) else ("", "steady_")
        rows += [
            _hidden(case, f"{part}hidden_fraction{_OF[lanes]}", own, part + lanes)
            for part in parts
            for lanes in _OF
            if own[0].get(f"{part}{lanes}busy")  # no counts in the steady part of a short step
        ]
        rows.append(_predicted(case, predicted[name] / 1e6, times[name]))
    return rows


def _counts_ms(records: Sequence[Mapping[str, float]]) -> float:
    """An exchange of counts of rows: behind rows where two strands run, alone where one does."""
    return median(record["counts"] for record in records) / 1e6


def _row(case: str, metric: str, ours: float, baseline: float) -> ResultRow:
    return ResultRow(
        case=case, metric=metric, ours=ours, baseline=baseline, ratio=ours / baseline, spread=None
    )


def _of_records(
    case: str, metric: str, records: Sequence[Mapping[str, float]], part: str, whole: str
) -> ResultRow:
    """Medians in ms, and the ratio within each record."""
    ratios = [record[part] / record[whole] for record in records]
    return ResultRow(
        case=case, metric=metric,
        ours=median(record[part] for record in records) / 1e6,
        baseline=median(record[whole] for record in records) / 1e6,
        ratio=median(ratios), spread=(min(ratios), max(ratios)),
    )  # fmt: skip


def _hidden(case: str, metric: str, records: Sequence[Mapping[str, float]], part: str) -> ResultRow:
    """The share of the all-to-alls' time in which the rank did not wait for one: ms hidden, of ms
    in flight. `steady_` is the part of a step in which two micro-batches are under way; `rows_` and
    `counts_` are the exchanges on one of the two lanes."""
    hidden = [
        {
            "hidden": max(0.0, each[f"{part}busy"] - each[f"{part}exposed"]),
            "busy": each[f"{part}busy"],
        }
        for each in records
    ]
    return _of_records(case, metric, hidden, "hidden", "busy")


def _predicted(case: str, predicted_ms: float, measured_ms: Sequence[float]) -> ResultRow:
    """The simulator's step over the median of those that were measured."""
    ratios = [predicted_ms / each for each in measured_ms]
    return ResultRow(
        case=case, metric="predicted_over_measured", ours=predicted_ms,
        baseline=median(measured_ms), ratio=predicted_ms / median(measured_ms),
        spread=(min(ratios), max(ratios)),
    )  # fmt: skip
