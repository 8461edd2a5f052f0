"""ZeRO-3 under two strands against PyTorch's own `fully_shard`, over several link rates.

Two ranks, one core each, share masters, gradients, optimizer state and weights of a Llama in
float32 (`parallel.data_shard = 2`); gradients are reduced after each micro-batch, as `fully_shard`
does by default. Eager is `fully_shard` on the same module, one group per block, weights resharded
after the forward. A short run of one strand says how long compute and communication take; from it
follow the rates. What travels does not depend on the tokens, compute does: long sequences let
communication = compute fall on a rate at which gloo's own work on the core is small. At each rate
all ways of running take turns step by step in one run. The first step of each way is not counted.
"""

from pathlib import Path

from interlace.bench.strands import Point, Size, run_size

_MODES = ("eager", "1", "list", "merge")
"""Ways to run a step: PyTorch's `fully_shard`, one strand, and two strands by two searches."""
_LAYOUT = (
    ("parallel.data_shard", 2),
    ("parallel.zero", 3),
    ("parallel.reduce", "micro_batch"),
)
"""Flags that shard weights over two ranks and reduce gradients in every micro-batch."""
FULL = Size(
    layers=2,
    width=512,
    sequence_length=1536,
    steps=3,
    points=tuple(Point(ratio=ratio, micro_batches=8, modes=_MODES) for ratio in (0.5, 1.0, 2.0)),
    calibration_rate="1gbit",
    layout=_LAYOUT,
    thrifty=False,
)
"""What the README's table was measured with."""
QUICK = Size(
    layers=2,
    width=512,
    sequence_length=256,
    steps=2,
    points=(Point(ratio=1.0, micro_batches=4, modes=_MODES),),
    calibration_rate="1gbit",
    layout=_LAYOUT,
    thrifty=False,
)
"""A smaller model: that all runs, and roughly how fast."""


def run(*, quick: bool, json_path: Path | None) -> int:
    """Calibrate, run all cases, print the tables; write JSON if asked."""
    return run_size("zero3", QUICK if quick else FULL, json_path)
