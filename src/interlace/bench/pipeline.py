"""Schedules of pipelines on our runtime, against torch.distributed.pipelining running the same.

Two ranks, one core each, run a GPT of plain PyTorch in float32, cut into the same chunks by both.
Once over the machine's own link, and once over links of a lab whose rate lets what a rank sends in
a step under 1F1B take a good part of the step. All ways take turns step by step in one run, and
their gradients are compared before. The first steps of each way are not counted. Then steps of our
ways are timed and recorded by turns, and what is recorded is simulated with its own times. At last
a step of each way is run with a look at the C allocator after every operator.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from interlace.bench.results import (
    ResultRow,
    environment,
    predicted_over_measured,
    speedup,
    write_json,
)
from interlace.errors import RunError
from interlace.lab import hosts
from interlace.ranks.launch import launch

_SCHEDULES = (
    ("gpipe", "GPipe", 1),
    ("one_f_one_b", "1F1B", 1),
    ("zb_h1", "InterleavedZeroBubble", 1),
    ("interleaved", "Interleaved1F1B", 2),
    ("zb_v", "ZBVZeroBubble", 2),
    ("dual_pipe_v", "DualPipeV", 2),
    ("eager_one_f_one_b", "", 1),
    ("folded", "", 2),
    ("eager_folded", "", 2),
)
"""(ours, PyTorch's of the same kind or empty, chunks on a rank). PyTorch's interleaved zero-bubble
schedule is ZB-H1 action by action when a rank has one stage."""
_BASELINE = "torch 1F1B"
"""What every way is compared with."""
_FULL = {
    "width": 256, "heads": 4, "blocks": 8, "words": 2048, "batch": 2, "length": 128,
    "micro_batches": 8,
}  # fmt: skip
"""The model and the step."""
_QUICK = {**_FULL, "width": 64, "micro_batches": 4}
"""A smaller model."""
_RANKS = 2
"""As many as this project's machines have cores."""


@dataclass(frozen=True)
class _Link:
    """How the ranks are joined."""

    name: str
    rate: str
    """Of the lab's links; empty for the machine's own."""


def run(*, quick: bool, json_path: Path | None) -> int:
    """Measure, print the tables; write JSON if asked."""
    from interlace.report.tables import bench_table  # noqa: PLC0415  rich

    reason = "this is already a lab" if hosts.inside_lab() else hosts.available()
    links = [_Link("this machine's own link", "")]
    if reason:
        print(f"note: no network namespaces here ({reason}): no slow link", file=sys.stderr)
    else:
        links.append(_Link("lab link 100mbit", "100mbit"))
    rows: list[ResultRow] = []
    for link in links:
        rows += rows_of(link.name, measure(link.rate, quick=quick))
    print(bench_table([asdict(row) for row in rows]))
    if json_path is not None:
        write_json(json_path, "pipeline", environment(", ".join(link.name for link in links)), rows)
        print(json_path)
    return 0


_Times = dict[str, dict[str, list[float]]]
"""`times`: ns of each step of each way; what `pipeline_world.predict` and `peaks` give."""


def measure(rate: str, *, quick: bool) -> _Times:
    """What one run of the ranks found. RunError when a rank fails."""
    job = {
        "size": _QUICK if quick else _FULL,
        "schedules": _SCHEDULES,
        "repeats": 3 if quick else 12,
        "recorded": 2 if quick else 15,
    }
    with tempfile.TemporaryDirectory(prefix="interlace-pipeline-") as folder:
        told, result = Path(folder) / "job.json", Path(folder) / "times.json"
        told.write_text(json.dumps(job), encoding="utf-8")
        rank = ["-m", "interlace.bench.pipeline_world", str(told), str(result)]
        command = [sys.executable, *rank]
        if not rate:
            launch(command, ranks=_RANKS)
        elif code := hosts.run_in_lab(command, hosts=_RANKS, ranks_per_host=1, rate=rate):
            raise RunError(
                f"the ranks of the bench ended with exit code {code}",
                hint="the message of a rank is above",
            )
        found: _Times = json.loads(result.read_text(encoding="utf-8"))
        return found


def rows_of(link: str, found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[ResultRow]:
    """Each of our schedules against PyTorch's runtime, running the same one and running 1F1B: times
    in ms, and peak memory beside weights in MiB. And against the simulator: times, the bubble in
    per cent of all ranks' time, and memory."""
    times = {name: [each / 1e6 for each in own] for name, own in found["times"].items()}
    peaks = {name: [each / 2**20 for each in own] for name, own in found["peak"].items()}
    rows = []
    for ours, theirs, _ in _SCHEDULES:
        case, mine = f"{ours}, {link}", f"ours {ours}"
        for metric, rival in (("pytorch", theirs and f"torch {theirs}"), ("1f1b", _BASELINE)):
            if rival:
                rows.append(speedup(case, f"speedup_vs_{metric}", times[mine], times[rival]))
            if rival and peaks:
                rows.append(speedup(case, f"memory_vs_{metric}", peaks[mine], peaks[rival]))
        for metric, predicted, measured, unit in (
            ("predicted_over_measured", "predicted", "measured", 1e6),
            ("predicted_over_recorded", "predicted", "recorded", 1e6),
            ("bubble_predicted_over_measured", "bubble_predicted", "bubble_measured", 0.01),
        ):
            simulated, real = (
                [each / unit for each in found[key][ours]] for key in (predicted, measured)
            )
            rows.append(replace(predicted_over_measured(case, simulated, real), metric=metric))
        if peaks:
            simulated = [each / 2**20 for each in found["peak_predicted"][ours]]
            row = predicted_over_measured(case, simulated, peaks[mine])
            rows.append(replace(row, metric="memory_predicted_over_measured"))
    return rows
