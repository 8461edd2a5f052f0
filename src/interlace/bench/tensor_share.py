"""The W shape with two strands against 1F1B, by the share of tensor-parallel communication.

Four ranks, two stages of two, run a GPT under PyTorch's own tensor parallelism on links of a lab.
Compute is emulated: each matmul sleeps for its FLOPs at a rate that is set so that the all-reduces
of a stage, which are real like everything else, take a given share of its time. 1F1B runs one
strand; `folded` and `dual_pipe_v` run a forward beside a backward. All ways take turns step by step
in one run, and their gradients are compared before, without emulation.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from interlace.errors import InputError, RunError
from interlace.lab import hosts

STAGES, RANKS_OF_STAGE = 2, 2
ONE_STRAND = "one_f_one_b"
"""What the others are compared with."""
WAYS = ((ONE_STRAND, 1), ("folded", 2), ("dual_pipe_v", 2), ("eager_folded", 2))
"""Schedules, and their chunks on a rank."""
RIVAL = "torch 1F1B"
"""PyTorch's own runtime, with the same modules."""
_RATE = "200mbit"
_SHARES = (0.1, 0.25, 0.4, 0.55)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSize:
    """The model and the step."""

    width: int = 256
    heads: int = 4
    blocks: int = 8
    words: int = 64
    length: int = 128
    """Tokens of a micro-batch."""
    micro_batches: int = 8
    repeats: int = 4
    shares: Sequence[float] = _SHARES
    """Of all-reduces in the time of a block, forward and backward, with one strand."""

    @property
    def block_flops(self) -> float:
        """Of a block's matmuls on one rank, forward and backward. Attention has too few to count
        beside them."""
        return 6 * 12 * self.width**2 * self.length / RANKS_OF_STAGE

    @property
    def reduced_values(self) -> int:
        """Of each all-reduce; a block has two in forward and two in backward."""
        return self.width * self.length

    def flops_per_s(self, share: float, reduce_ns: float) -> float:
        """The rate of emulated compute at which all-reduces of so long take this share."""
        compute_ns = 4 * reduce_ns * (1 - share) / share
        return self.block_flops / compute_ns * 1e9


def run(*, quick: bool, json_path: Path | None) -> int:
    """Measure, print the table; write JSON if asked."""
    from interlace.report.tables import bench_table  # noqa: PLC0415  rich

    if reason := "this is already a lab" if hosts.inside_lab() else hosts.available():
        raise InputError(
            f"no network namespaces here: {reason}", hint="run it as root on Linux, outside a lab"
        )
    small = ShareSize(blocks=4, micro_batches=4, repeats=2, shares=(0.4,))
    size = small if quick else ShareSize()
    rows = rows_of(size, measure(size))
    print(bench_table([asdict(row) for row in rows]))
    if json_path is not None:
        link = f"lab links of {_RATE} between ranks; {EMULATED}: matmuls sleep for their FLOPs"
        write_json(json_path, "tensor_share", environment(link), rows)
        print(json_path)
    return 0


def measure(size: ShareSize) -> list[dict[str, Any]]:
    """What each point found, by share. RunError when a rank fails."""
    with tempfile.TemporaryDirectory(prefix="interlace-share-") as folder:
        told, result = Path(folder) / "job.json", Path(folder) / "found.json"
        told.write_text(json.dumps(asdict(size)), encoding="utf-8")
        command = [sys.executable, "-m", "interlace.bench.tensor_share_world", str(told)]
        ranks = STAGES * RANKS_OF_STAGE
        code = hosts.run_in_lab([*command, str(result)], hosts=ranks, ranks_per_host=1, rate=_RATE)
        if code:
            raise RunError(
                f"the ranks of the bench ended with exit code {code}",
                hint="the message of a rank is above",
            )
        found: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
        return found


def rows_of(size: ShareSize, points: list[dict[str, Any]]) -> list[ResultRow]:
    """By share: what a forward and a backward side by side gain, each schedule against 1F1B, the W
    shape against its formula, and all against the simulator."""
    rows: list[ResultRow] = []
    for point in points:
        case = f"tp share {100 * point['share']:.0f} %, {EMULATED}"
        ms = {name: [each / 1e6 for each in own] for name, own in point["times"].items()}
        apart, together = ([ns / 1e6 for ns in point[key]] for key in ("apart", "together"))
        rows.append(speedup(case, "pair_gain", together, apart))
        for name, _ in WAYS[1:]:
            named = f"{name}, {case}"
            rows.append(speedup(named, "speedup_vs_1f1b", ms[name], ms[ONE_STRAND]))
        rows.append(speedup(f"folded, {case}", "speedup_vs_pytorch_1f1b", ms["folded"], ms[RIVAL]))
        expected = formula_gain(size, sum(apart) / len(apart), sum(together) / len(together))
        gain = speedup(case, "", ms["folded"], ms[ONE_STRAND])
        assert gain.ratio is not None
        assert gain.spread is not None
        least, most = gain.spread
        rows.append(
            ResultRow(
                case=f"folded, {case}", metric="gain_over_formula", ours=gain.ratio,
                baseline=expected, ratio=gain.ratio / expected,
                spread=(least / expected, most / expected),
            )
        )  # fmt: skip
        for name, _ in WAYS:
            predicted = [ns / 1e6 for ns in point["predicted"][name]]
            rows.append(
                predicted_over_measured(f"{name}, {case}", predicted, ms[name][: len(predicted)])
            )
    return rows


def formula_gain(size: ShareSize, apart: float, together: float) -> float:
    """What `folded` gains over 1F1B with nothing but F + B and FB of half a stage: steps of
    (m + p - 1) 2 (F + B), and of 2p (F + B) + 2 (m - 1) FB (docs/concepts/pipelines.md)."""
    count = size.micro_batches
    one = (count + STAGES - 1) * 2 * apart
    return one / (2 * STAGES * apart + 2 * (count - 1) * together)
