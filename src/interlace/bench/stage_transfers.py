"""A pipeline of two stages on two hosts: what planned resharding beside compute gains.

Each stage has two ranks of one host of a lab, and hosts are joined by a shaped link. Compute is
emulated: matmuls, convolutions and attention sleep for their FLOPs at a rate that is set so that
what crosses between stages, which is real like everything else, takes the share that it takes on
the machines of Zhuang et al. (arXiv 2211.05322, `stage_transfers_cases`). All ways run the same
graphs and take turns step by step in one run, and their gradients are compared before, without
emulation.

Three ways wait for every transfer where it stands, under 1F1B: each receiving rank gets all that it
needs from a sender ("send/recv"), a share each with an all-gather inside the host ("all-gather"),
or a chain of broadcasts. The paper's way has broadcasts beside compute and eager 1F1B. Ours has
ZB-V, which folds the model and fills its bubble with gradients of weights; of GPT also an order of
ZB-V's chunks that is searched from what they and their messages took, and keeps no more than the
paper's way does. "signal" is a way whose messages carry one element: what is to be reached.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from interlace.bench.results import (
    ResultRow,
    environment,
    predicted_over_measured,
    speedup,
    write_json,
)
from interlace.bench.searched import EMULATED
from interlace.bench.stage_transfers_cases import FULL, QUICK, StageCase
from interlace.errors import InputError, RunError, nearest
from interlace.lab import hosts

BLOCKING = "send/recv, 1F1B"
"""What the others are compared with."""
GATHERED, BROADCAST = "all-gather, 1F1B", "broadcast, 1F1B"
PAPER, OURS = "broadcast beside, eager 1F1B", "ours, ZB-V"
SEARCHED = "ours, searched"
"""Only where `StageCase.searched`: it is searched from what ZB-V took, so it is not in `WAYS`."""
SIGNAL = "signal of "
"""In front of the way whose messages carry one element."""
TORCH = "torch 1F1B"
"""PyTorch's own runtime, with the same modules."""
WAYS = (
    (BLOCKING, "one_f_one_b", "blocking", "send_recv"),
    (GATHERED, "one_f_one_b", "blocking", "local_all_gather"),
    (BROADCAST, "one_f_one_b", "blocking", "broadcast"),
    (PAPER, "eager_one_f_one_b", "beside", "broadcast"),
    (OURS, "zb_v", "beside", "auto"),
    (SIGNAL + PAPER, "eager_one_f_one_b", "signal", "auto"),
    (SIGNAL + OURS, "zb_v", "signal", "auto"),
)
"""Name, schedule, whether transfers block, run beside compute or carry nothing, and strategy."""
_HOSTS, _RANKS_OF_HOST = 2, 2
_PARTS = ("all", "gpt", "u_transformer")
"""Words that `--part` takes: the cases of one model."""


def run(*, quick: bool, json_path: Path | None, part: str = "all") -> int:
    """Measure, print the table; write JSON if asked. `part` is `all`, `gpt` or `u_transformer`."""
    from interlace.report.tables import bench_table  # noqa: PLC0415  rich

    if reason := "this is already a lab" if hosts.inside_lab() else hosts.available():
        raise InputError(
            f"no network namespaces here: {reason}", hint="run it as root on Linux, outside a lab"
        )
    if part not in _PARTS:
        raise InputError(f"--part {part} is no part of this bench", hint=nearest(part, _PARTS))
    cases = [case for case in (QUICK if quick else FULL) if part in ("all", case.model)]
    if not cases:
        raise InputError(f"--quick has no case of --part {part}", hint="leave out one of both")
    rows = [row for case in cases for row in rows_of(case, measure(case))]
    print(bench_table([asdict(row) for row in rows]))
    if json_path is not None:
        rates = ", ".join(f"{case.rate} ({case.name})" for case in cases)
        link = (
            f"lab links between hosts: {rates}; {EMULATED}: matmuls, convolutions and attention "
            "sleep for their FLOPs"
        )
        write_json(json_path, "stage_transfers", environment(link), rows)
        print(json_path)
    return 0


def measure(case: StageCase) -> dict[str, Any]:
    """What a case found, in ranks of its own: DTensor remembers the groups of meshes that are
    alike, so those of a case before would be found in graphs. RunError when a rank fails."""
    with tempfile.TemporaryDirectory(prefix="interlace-stages-") as folder:
        told, result = Path(folder) / "job.json", Path(folder) / "found.json"
        told.write_text(json.dumps(asdict(case)), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "interlace.bench.stage_transfers_world",
            str(told),
            str(result),
        ]
        code = hosts.run_in_lab(
            command, hosts=_HOSTS, ranks_per_host=_RANKS_OF_HOST, rate=case.rate
        )
        if code:
            raise RunError(
                f"the ranks of the bench ended with exit code {code}",
                hint="the message of a rank is above",
            )
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def rows_of(case: StageCase, found: Mapping[str, Any]) -> list[ResultRow]:
    """The share of communication, against that of the paper's machines; each way against send/recv
    without overlap, those beside compute against their bound, and against the simulator."""
    label = f"{case.name}, {EMULATED}"
    shares = [found["crossing_ns"] / each for each in found["pass_ns"]]
    rows = [
        ResultRow(
            case=label, metric="boundary_over_compute", ours=sum(shares) / len(shares),
            baseline=case.share, ratio=sum(shares) / len(shares) / case.share,
            spread=(min(shares) / case.share, max(shares) / case.share),
        )
    ]  # fmt: skip
    ms = {name: [each / 1e6 for each in own] for name, own in found["times"].items()}
    for name in (GATHERED, BROADCAST, TORCH, PAPER, OURS, SEARCHED):
        if name in ms:
            rows.append(speedup(f"{name}, {label}", "speedup_vs_blocking", ms[name], ms[BLOCKING]))
    beside = [name for name in (PAPER, OURS, SEARCHED) if name in ms]
    for name in beside:
        rows.append(speedup(f"{name}, {label}", "of_signal_bound", ms[name], ms[SIGNAL + name]))
    for name in beside:
        predicted, measured = (
            [each / 1e6 for each in found[key][name]] for key in ("predicted", "measured")
        )
        rows.append(predicted_over_measured(f"{name}, {label}", predicted, measured))
    return rows
