"""Rows of `simulator` for two strands: DHelix's published factors against simulated ones.

The rows are those of arXiv 2411.15871 (`presets/measured/two_strands.csv`): throughput of Megatron
and of two strands on 64 A40 and 64 A800. Each is simulated from shapes, with one strand as Megatron
runs it and with two as the published program does, and the ratio is held against theirs; a third
time with two strands in the order of our own planner. Hosts are the presets `a40` and `a800` as
they are, shapes of models the presets of their names. What the paper leaves out is the same for all
rows.

Of both programs (github.com/DHeLlam-502/dhellam, patch and run script): 16-bit gradients, to which
matmuls add, summed over replicas when the step is over, as nothing asks for overlap; stages that
compute nothing while they send; keys and values around a ring. Megatron keeps a rank's part of what
it gathers along the sequence and gathers it again in the backward, the published program keeps the
whole. That pairs segments between barriers, and runs the work of a strand beside its own
collective.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

import interlace.presets
from interlace.bench.results import ResultRow
from interlace.config import DataConfig, RunConfig
from interlace.hardware.cluster import Cluster, load_cluster
from interlace.hardware.step_job import FUSED_SUM_BYTES
from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.search.planner import Search
from interlace.search.problem import Problem
from interlace.search.segment_pairs import CUTS, order_segment_pairs
from interlace.strategy.job_layout import JobLayout, step_job
from interlace.strategy.job_links import JobLinks
from interlace.strategy.layer_operators import LayerOperators
from interlace.strategy.pass_times import PassTimes
from interlace.strategy.simulated_job import JobParts, SimulatedJob, simulate_job
from interlace.toml_text import read_toml

SEQUENCE = 8192
"""Where the paper gives none: that of its released demo, and half of its long ones of 16,384."""
STEP_TOKENS = 4 * 2**20
"""Of all replicas in a step, one sequence in each micro-batch. The paper gives no batch, and says
that traffic of replicas and stages is small beside that of layers; Llama 2 was trained with so
many (arXiv 2307.09288)."""
TRANSFER_FACTOR = 1.25
"""How many times longer a collective takes beside an operator: the paper says that kernels slow
each other by 20 to 30 %. Operators are slowed by the multiprocessors that NCCL holds, 5 % on A40,
so that the overlap effectiveness of a matmul that is longer than its collective is 0.94 (paper:
0.85 to 0.99)."""
ATTENTION_FACTOR = 1.22
"""How many times longer attention takes beside a collective. The paper measured an overlap
effectiveness of 0.70 to 0.85 for attention with a gather; with `TRANSFER_FACTOR` the middle of it
is 1 / (1 - 0.225 / 1.25)."""
BARRIER_NS = 100_000
"""Of the host, which waits for the device behind each block and then starts the next from Python.
The paper has 10 to 20 % of the time of collectives for it; this is 8 to 10 % of that in its dense
rows on A800, and 1 to 7 % on A40."""
NEAR = 6.0
"""Points within which a factor counts as met."""
HEADER = (
    "two strands over one",
    "published",
    "simulated",
    "points",
    "published TFLOP/s",
    "simulated",
    "exposed",
    "with two",
    "ours",
)
_CASE = "two strands, DHelix"


@dataclass(frozen=True, kw_only=True)
class PublishedFactor:
    """A row of the table."""

    name: str
    model: str
    cluster: str
    sequence: int
    data: int
    tensor: int
    context: int
    pipeline: int
    expert: int
    tflops: float
    """Of Megatron, for each device; 0 where the paper gives tokens."""
    factor: float
    """Of two strands over it."""


@dataclass(frozen=True, kw_only=True)
class StrandScore:
    """What came out for a row."""

    row: PublishedFactor
    factor: float
    tflops: float
    """Of one strand, for each device; attention as a full square, as Megatron counts."""
    exposed: tuple[float, float]
    """Share of a step of one strand, and of two, in which a rank waits for collectives."""
    lanes: dict[str, float]
    """The same of one strand by lane."""
    own_factor: float
    """Of two strands in the order that our planner finds, without barriers, over the same."""

    @property
    def points(self) -> float:
        """Simulated less published factor, in percentage points."""
        return 100 * (self.factor - self.row.factor)


def published_factors() -> list[PublishedFactor]:
    """All rows, in their order."""
    path = Path(interlace.presets.__path__[0]) / "measured" / "two_strands.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return [_published(row) for row in csv.DictReader(file)]


def _published(row: dict[str, str]) -> PublishedFactor:
    degrees = {name: int(row[name]) for name in ("dp", "tp", "cp", "pp", "ep")}
    sequence = int(row["sequence"] or SEQUENCE)
    layout = ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
    return PublishedFactor(
        name=f"{row['case']}, {row['cluster'].upper()}, {sequence // 1024}K: {layout}",
        model=row["model"],
        cluster=row["cluster"],
        sequence=sequence,
        data=degrees["dp"],
        tensor=degrees["tp"],
        context=degrees["cp"],
        pipeline=degrees["pp"],
        expert=degrees["ep"],
        tflops=float(row["megatron"]) if row["unit"] == "TFLOP/s" else 0.0,
        factor=float(row["two_strands"]) / float(row["megatron"]),
    )


def strand_scores(every: int = 1) -> list[StrandScore]:
    """One for each row, or for each so many."""
    return [_score(row) for row in published_factors()[::every]]


def factor_error(scores: list[StrandScore]) -> float:
    """Mean of the absolute differences, in points."""
    return mean(abs(each.points) for each in scores)


def within(scores: list[StrandScore]) -> int:
    """Rows that are met."""
    return sum(abs(each.points) <= NEAR for each in scores)


def strand_table(scores: list[StrandScore]) -> list[tuple[str, ...]]:
    """Cells of the printed table, in the order of `HEADER`."""
    return [
        (
            each.row.name,
            f"{each.row.factor:.2f}",
            f"{each.factor:.2f}",
            f"{each.points:+.0f}",
            f"{each.row.tflops:.0f}" if each.row.tflops else "-",
            f"{each.tflops:.0f}",
            f"{100 * each.exposed[0]:.0f} %",
            f"{100 * each.exposed[1]:.0f} %",
            f"{each.own_factor:.2f}",
        )
        for each in scores
    ]


def strand_rows(scores: list[StrandScore]) -> list[ResultRow]:
    """In the form of all benches: ours are simulated, the baseline published, in each row."""

    def row(case: str, metric: str, ours: float, baseline: float) -> ResultRow:
        ratio = ours / baseline if baseline else None
        return ResultRow(
            case=case, metric=metric, ours=ours, baseline=baseline, ratio=ratio, spread=None
        )

    found = [row(each.row.name, "factor", each.factor, each.row.factor) for each in scores]
    found.append(row(_CASE, "factor_error", factor_error(scores), 0.0))
    found.append(row(_CASE, "within_6_points", within(scores), len(scores)))
    return found


def _score(row: PublishedFactor) -> StrandScore:
    config, cluster = _config(row), load_cluster(row.cluster)
    layout = JobLayout(
        data_shard=row.data,
        context=row.context,
        context_method="ring" if row.context > 1 else "ulysses",
        expert=row.expert,
        tensor=row.tensor,
        pipeline=row.pipeline,
        zero=1,
        micro_batches=STEP_TOKENS // row.sequence // row.data,
        tied_head=config.model.tied_head,
    )
    plain, both = ("one_f_one_b", "folded") if row.pipeline > 1 else ("one_strand", "two_strand")

    def run(schedule: str, *searches: str | Search, gathers_again: bool = False) -> SimulatedJob:
        parts = _parts(config, cluster, layout, searches, gathers_again=gathers_again)
        return simulate_job(config, cluster, replace(layout, schedule=schedule), parts)

    one = run(plain, "merge", gathers_again=True)
    two, own = run(both, *_PUBLISHED), run(both, "merge")
    lanes = {lane: seconds / one.seconds for lane, seconds in one.exposed_s.items()}
    return StrandScore(
        row=row,
        factor=one.seconds / two.seconds,
        tflops=one.job.model_flops / one.seconds / layout.ranks / 1e12,
        exposed=(sum(lanes.values()), _exposed(two)),
        lanes=lanes,
        own_factor=one.seconds / own.seconds,
    )


def _exposed(job: SimulatedJob) -> float:
    return sum(job.exposed_s.values()) / job.seconds


def _config(row: PublishedFactor) -> RunConfig:
    path = Path(interlace.presets.__path__[0]) / "models" / f"{row.model}.toml"
    shape = read_toml(path)[0]["model"]
    experts = ExpertsConfig(**shape.pop("experts", {}))
    model = ModelConfig(experts=experts, **shape)
    return RunConfig(model=model, data=DataConfig(sequence_length=row.sequence))


def _parts(
    config: RunConfig,
    cluster: Cluster,
    layout: JobLayout,
    searches: tuple[str | Search, ...],
    *,
    gathers_again: bool,
) -> JobParts:
    """Megatron and DHelix have kernels of TransformerEngine: norms and activations are fused, and
    matmuls add to the sums of gradients. Rows of experts are gathered."""
    plain = step_job(config, layout)
    job = replace(
        plain,
        experts=plain.experts and replace(plain.experts, gathered=True),
        fused_operators=True,
        gradient_bytes=2,
        summed_bytes=FUSED_SUM_BYTES,
        overlap_gradients=False,
    )
    links = JobLinks(cluster, layout, TRANSFER_FACTOR, ATTENTION_FACTOR)
    bucket = config.parallel.bucket_mib * 2**20
    operators = LayerOperators(job, links, bucket, gathers_again=gathers_again)
    times = PassTimes(operators, searches=searches, barrier_ns=BARRIER_NS)
    return JobParts(job, links, times, waits_for_messages=True, sums_late=True)


def _blocks(
    cuts: int, problem: Problem, _: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    blocks = order_segment_pairs(problem, beside=True, barrier_ns=BARRIER_NS, cuts=(cuts,))
    return blocks.order, blocks.barriers


_PUBLISHED = tuple(Search(partial(_blocks, cuts)) for cuts in CUTS)
"""The published program runs what its search found for each segmentation and keeps the fastest."""
