"""The cases of the bench of stages: the paper's models, scaled, at its shares of communication.

What counts is how long what a micro-batch hands over takes on the link between hosts, once each
way, against forward and backward of a stage: c / (F + B). It follows from arXiv 2211.05322 as its
artifact has it, and from `V100_USED`:

* GPT 1.3B in two stages of tensor parallelism 2: 16 sequences of 1,024 tokens a micro-batch. The
  boundary is 16,384 x 2,048 values of 2 bytes, 67.1 MB: 53.7 ms at 10 Gb/s. The model's FLOPs with
  recomputation are 96 T L h^2 (1 + s / 6h + v / 16Lh) = 1.82e14, a quarter on each GPU at 60
  TFLOP/s: 757 ms. So c / (F + B) = 0.071. If nothing is hidden and nothing sent twice, a period is
  1 + 2 x 0.071 = 1.14 as long; the paper gains 10 %.
* U-Transformer 1B (our preset `1b`) in two stages of two GPUs that share the batch: 64 images a
  micro-batch. Cut at `up.2`, where stages have 52 and 48 % of the FLOPs, five values of an image
  cross: 1920 x 16 x 16 between the levels, and skips of 480 x 32 x 32 (two), 960 x 16 x 16 and
  480 x 16 x 16, in float32 7.37 MB: 64 images take 377 ms. Forward is 205 GFLOP an image, so
  forward and backward are 3.94e13 in all, a quarter on each GPU at 7.5 TFLOP/s: 1,313 ms. So
  c / (F + B) = 0.287, and a period is 1.57 as long; the paper gains 50 %.
"""

from dataclasses import dataclass
from typing import Literal

HOST_LINK_BITS_PER_S = 10e9
"""Of a p3.8xlarge."""
V100_USED = 0.48
"""Share of a V100's peak (125 TFLOP/s in float16, 15.7 in float32) that its compute reaches: a
choice within what the paper plots, 200 to 500 TFLOP/s on 4 to 8 GPUs for GPT and 20 to 60 on 2 to 8
for the U-Transformer."""
_V100_HALF, _V100_FULL = 125e12, 15.7e12
_GPUS = 4

StageLayout = Literal["tp", "dp_replicate"]
"""The axis of the two ranks of a stage."""


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """What a micro-batch of a model of the paper costs."""

    boundary_bytes: float
    """What crosses from stage to stage, once."""
    flops: float
    """Forward and backward, of the whole model."""
    peak_flops_per_s: float
    """Of a GPU."""

    @property
    def share(self) -> float:
        """c / (F + B): time of what crosses on the link, over forward and backward of a stage."""
        transfer_s = 8 * self.boundary_bytes / HOST_LINK_BITS_PER_S
        compute_s = self.flops / _GPUS / (V100_USED * self.peak_flops_per_s)
        return transfer_s / compute_s


def _gpt_flops(*, tokens: int, length: int, width: int, layers: int, words: int) -> float:
    """With recomputation of the forward."""
    other = length / (6 * width) + words / (16 * layers * width)
    return 96 * tokens * layers * width**2 * (1 + other)


GPT_1B3 = PaperModel(
    boundary_bytes=16 * 1024 * 2048 * 2,
    flops=_gpt_flops(tokens=16 * 1024, length=1024, width=2048, layers=24, words=51200),
    peak_flops_per_s=_V100_HALF,
)
"""Batch 64 in 4 micro-batches."""
U_TRANSFORMER_1B = PaperModel(
    boundary_bytes=64 * 4 * (16**2 * (1920 + 960 + 480) + 32**2 * 2 * 480),
    flops=3 * 64 * 205.1e9,
    peak_flops_per_s=_V100_FULL,
)
"""Batch 2048 in 32 micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCase:
    """Two stages of two ranks each, one host for each stage."""

    model: Literal["gpt", "u_transformer"]
    layouts: tuple[StageLayout, StageLayout]
    """Of the first stage and the second."""
    micro_batches: int
    samples: int
    """Sequences or images of a micro-batch."""
    repeats: int
    searched: bool = False
    """Whether an order is searched too; only where chunks hand over to the next alone, as the
    search counts no other messages."""
    rate: str = "100mbit"
    """Of the link between the hosts. Compute is as much slower as transfers are, so that the share
    stays, and what four ranks on two cores do beside it weighs less on a slow link."""

    @property
    def name(self) -> str:
        """As the table has it."""
        model = "GPT" if self.model == "gpt" else "U-Transformer"
        axes = [axis.removesuffix("_replicate") + " 2" for axis in self.layouts]
        return f"{model} {' to '.join(axes)}, {self.micro_batches} micro-batches"

    @property
    def share(self) -> float:
        """c / (F + B) of the paper's model."""
        return (GPT_1B3 if self.model == "gpt" else U_TRANSFORMER_1B).share

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether PyTorch's pipelines can run it as it is: all ranks have the whole batch."""
        return tuple(self.layouts) == ("tp", "tp")


FULL = (
    StageCase(
        model="gpt", layouts=("tp", "tp"), micro_batches=4, samples=4, repeats=6,
        searched=True,
    ),
    StageCase(
        model="gpt", layouts=("tp", "dp_replicate"), micro_batches=4, samples=4, repeats=6,
        searched=True,
    ),
    StageCase(
        model="u_transformer", layouts=("dp_replicate", "dp_replicate"), micro_batches=32,
        samples=64, repeats=3, rate="36mbit",
    ),
)  # fmt: skip
"""GPT of 4 blocks 256 wide on 128 tokens, a U-Transformer of 32 channels on images of 8 x 8: length
over width and pixels over channels are the paper's, so operators have its shares of the FLOPs."""
QUICK = (
    StageCase(
        model="gpt", layouts=("tp", "dp_replicate"), micro_batches=4, samples=4, repeats=2,
        searched=True,
    ),
)  # fmt: skip
"""One case, about four minutes."""
