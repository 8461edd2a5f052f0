"""The blocks of `interlace bench decompose` and the ways to run them, as names and sizes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

COMPUTE = "compute"
"""Nothing is sent: the block on rows that were gathered before, without the sum over ranks."""
VANILLA = "vanilla"
"""Collectives and matmuls in turn, each waited for at once."""
SLICES = {"slicing 2": 2, "slicing 4": 4, "slicing 8": 8}
"""Data slicing, the baseline: into how many slices, by the names in the table."""
VARIANTS = ("ring", "direct", "bidirectional")
"""Orders of sends, as `decompose.order` calls them."""
_SETTLED = 0.01
"""Share by which the two fastest repeats may differ where the fastest is taken for settled."""
QUERY_SPLIT = "query-split"
"""Attention and output projection by query slices; the gather before it is `ring`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One block, in float32."""

    block: Literal["mlp", "attention"]
    width: int
    rows: int
    """Of one rank."""
    inner: int = 4
    """Inner width of an MLP over `width`: what is computed for each byte sent grows with it."""
    head_size: int = 128
    causal: bool = False
    """Of attention: with a mask, slices of queries differ in work."""
    ratios: tuple[float, ...] = (0.5, 0.8, 1.5)
    """Transfer time over compute time of a slice, at each of which it is run."""
    flops_per_s: float | None = None
    """Speed of emulated or paced compute; None computes as fast as it can."""
    paced: bool = False
    """Computed, and then asleep until the time of that speed is over."""
    compatible: bool = False
    """Computed by MKL's code path for any CPU, 2 to 3 times as slow; see `Job.environment`."""

    @property
    def compute(self) -> str:
        """What is unusual about its compute, for labels."""
        if self.flops_per_s:
            return ", paced compute" if self.paced else ", emulated compute"
        return ", compatible MKL" if self.compatible else ""

    @property
    def name(self) -> str:
        """`mlp`, `mlp 32 D` with another inner width than 4 D, `attention`, `causal attention`."""
        if self.block == "mlp":
            return self.block if self.inner == 4 else f"{self.block} {self.inner} D"
        return f"causal {self.block}" if self.causal else self.block

    @property
    def slice_bytes(self) -> int:
        """What one transfer of a decomposed collective moves."""
        return self.rows * self.width * 4

    def ways(self, ranks: int) -> tuple[str, ...]:
        """All ways to run it, in turn order; between two ranks all variants are the ring."""
        variants = VARIANTS if ranks > 2 else VARIANTS[:1]
        split = (QUERY_SPLIT,) if self.block == "attention" else ()
        return (COMPUTE, VANILLA, *SLICES, *variants, *split)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of one world measure."""

    shapes: tuple[Shape, ...]
    turns: int
    """Timed steps of each way, forward and again forward + backward; one comes before them."""
    most_turns: int = 0
    """If larger, steps go on up to so many until each way has `settled`."""
    emulated_links: bool = False
    """Links made in user space, where ranks are no hosts of a lab."""

    @property
    def environment(self) -> dict[str, str]:
        """Of its ranks. MKL chooses its code path once in a process: all shapes have the same."""
        return {"MKL_CBWR": "COMPATIBLE"} if self.shapes[0].compatible else {}


def hidden_under_ns(parts_ns: Mapping[str, int], ranks: int) -> int:
    """What is computed while one slice of a reduce-scatter travels: of attention a query slice,
    then its rows of the output projection. `parts_ns` as in `decompose_job.Calibration`."""
    return parts_ns["scatter"] + parts_ns.get("attention", 0) // ranks


def settled(times_ns: Sequence[int]) -> bool:
    """Whether the two fastest steps differ by 1 % at most: then something else on the machine has
    probably slowed neither."""
    fastest, *others = sorted(times_ns)
    return bool(others) and others[0] <= (1 + _SETTLED) * fastest


def read_job(path: Path) -> Job:
    """The job that `write_job` wrote."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    shapes = tuple(map(shape_of, fields.pop("shapes")))
    return Job(shapes=shapes, **fields)


def shape_of(fields: Mapping[str, Any]) -> Shape:
    """The shape whose fields these are; JSON made a list of the ratios."""
    values: dict[str, Any] = {**fields, "ratios": tuple(fields["ratios"])}
    return Shape(**values)


def write_job(job: Job, path: Path) -> None:
    """For the ranks of a world to read."""
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")
