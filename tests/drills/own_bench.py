"""A bench in one file: attention as one kernel against attention written out."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from interlace.bench.results import environment, speedup, write_json


def run(*, quick: bool, json_path: Path | None, width: int = 64) -> int:
    """Times both in turns, prints a table, and writes the rows to `json_path` if it is given."""
    q, k, v = torch.rand(3, 1, 4, 64 if quick else 512, width)

    def written_out() -> Tensor:
        return torch.softmax(q @ k.mT / width**0.5, dim=-1) @ v

    ours, baseline = [], []
    for _ in range(3 if quick else 20):
        ours.append(_seconds(lambda: F.scaled_dot_product_attention(q, k, v)))
        baseline.append(_seconds(written_out))
    row = speedup(f"width {width}", "ms", [1e3 * s for s in ours], [1e3 * s for s in baseline])
    print(f"{'case':12} {'one kernel':>12} {'written out':>12} {'ratio':>6}")
    print(f"{row.case:12} {row.ours:9.3f} ms {row.baseline:9.3f} ms {row.ratio:6.2f}")
    if json_path is not None:
        write_json(json_path, "own_bench", environment("none"), [row])
    return 0


def _seconds(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
