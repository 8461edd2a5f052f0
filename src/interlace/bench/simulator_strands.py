"""Rows of `simulator` for two strands: DHelix's published factors against simulated ones.

The rows are those of arXiv 2411.15871 (`presets/measured/two_strands.csv`): throughput of Megatron
and of two strands on 64 A40 and 64 A800. Each is simulated twice from shapes, with one strand and
with two, and the ratio is held against theirs. Hosts are the presets `a40` and `a800` as they are,
shapes of models the presets of their names. What the paper leaves out is the same for all rows.
Ranks that share sequences send keys and values around a ring, as Megatron's do.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import interlace.presets
from interlace.bench.results import ResultRow
from interlace.config import DataConfig, RunConfig
from interlace.hardware.cluster import Cluster, load_cluster
from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.strategy.job_layout import JobLayout, step_job
from interlace.strategy.job_links import JobLinks
from interlace.strategy.layer_operators import LayerOperators
from interlace.strategy.pass_times import PassTimes
from interlace.strategy.simulated_job import JobParts, SimulatedJob, simulate_job
from interlace.toml_text import read_toml

SEQUENCE = 8192
"""Where the paper gives none: that of its released demo, and half of its long ones of 16,384."""
MICRO_BATCHES = 16
"""Sequences of a replica in a step, one in each micro-batch. The paper gives no batch; the demo has
16 sequences on one replica."""
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
        micro_batches=MICRO_BATCHES,
        tied_head=config.model.tied_head,
    )
    parts = _parts(config, cluster, layout)
    plain, both = ("one_f_one_b", "folded") if row.pipeline > 1 else ("one_strand", "two_strand")
    one, two = (
        simulate_job(config, cluster, replace(layout, schedule=name), parts)
        for name in (plain, both)
    )
    lanes = {lane: seconds / one.seconds for lane, seconds in one.exposed_s.items()}
    work = parts.job.model_flops
    return StrandScore(
        row=row,
        factor=one.seconds / two.seconds,
        tflops=work / one.seconds / layout.ranks / 1e12,
        exposed=(sum(lanes.values()), _exposed(two)),
        lanes=lanes,
    )


def _exposed(job: SimulatedJob) -> float:
    return sum(job.exposed_s.values()) / job.seconds


def _config(row: PublishedFactor) -> RunConfig:
    path = Path(interlace.presets.__path__[0]) / "models" / f"{row.model}.toml"
    shape = read_toml(path)[0]["model"]
    experts = ExpertsConfig(**shape.pop("experts", {}))
    model = ModelConfig(experts=experts, **shape)
    return RunConfig(model=model, data=DataConfig(sequence_length=row.sequence))


def _parts(config: RunConfig, cluster: Cluster, layout: JobLayout) -> JobParts:
    """Megatron and DHelix have kernels of TransformerEngine: norms and activations are fused."""
    job, links = replace(step_job(config, layout), fused_operators=True), JobLinks(cluster, layout)
    operators = LayerOperators(job, links, config.parallel.bucket_mib * 2**20)
    return JobParts(job, links, PassTimes(operators))
