"""What each technique of a layout gives: the same job with that one turned off."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.rules import check
from interlace.schedules.finder import PLAIN, of_strands
from interlace.strategy.job_layout import JobLayout, with_layout
from interlace.strategy.rank_memory import MemoryParts
from interlace.strategy.schedule_facts import interleaves
from interlace.strategy.simulated_job import SimulatedJob, parts_of, simulate_job


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A job without one of its techniques."""

    technique: str
    instead: str
    seconds: float
    """Of a step; 0 if it cannot run."""
    memory: MemoryParts | None
    fits: bool
    why_not: str = ""
    """Why it cannot run; empty if it can."""


def contributions(found: SimulatedJob) -> tuple[Contribution, ...]:
    """One for each technique that the layout uses."""
    return tuple(
        _without(found, technique, instead, layout, side_by_side=side_by_side)
        for technique, instead, layout, side_by_side in _variants(found.layout)
    )


def _variants(layout: JobLayout) -> Iterator[tuple[str, str, JobLayout, bool]]:
    """(technique, what is done instead, the layout, whether strands still run side by side)."""
    if interleaves(layout):
        if layout.pipeline == 1:
            yield "two strands", "one strand", replace(layout, schedule=of_strands(1).name), True
        else:
            yield "two strands", "the same order, one pass after the other", layout, False
    if layout.decompose != "off":
        whole = replace(layout, decompose="off", pieces=0)
        yield f"decompose {layout.decompose}", "whole collectives", whole, True
    plain = replace(layout, schedule=PLAIN)
    if layout.pipeline > 1 and plain != layout:
        yield f"schedule {layout.schedule}", "1F1B", plain, True
    if layout.pipeline > 1:
        count, left = divmod(layout.micro_batches, layout.pipeline)
        if not left:
            schedule = of_strands(2 if count > 1 else 1).name
            flat = replace(
                layout,
                pipeline=1,
                micro_batches=count,
                schedule=schedule,
                data_shard=layout.data_shard * layout.pipeline,
                zero=3,
            )
            yield f"pipeline {layout.pipeline}", "ZeRO-3 over more ranks", flat, True
    if layout.tensor > 1 and not layout.micro_batches % layout.tensor:
        wide = replace(
            layout,
            tensor=1,
            micro_batches=layout.micro_batches // layout.tensor,
            data_shard=layout.data_shard * layout.tensor,
            zero=3,
        )
        yield f"tensor {layout.tensor}", "ZeRO-3 over more ranks", wide, True
    yield from _shared_out(layout)
    if layout.data_shard > 1:
        if layout.zero == 3:
            yield "ZeRO-3", "ZeRO-1", replace(layout, zero=1, reduce="step"), True
        whole = replace(layout, data_replicate=layout.replicas, data_shard=1, zero=3, reduce="step")
        yield "shards", "replicas", whole, True
    if layout.recompute != "none":
        yield f"recompute {layout.recompute}", "none", replace(layout, recompute="none"), True


def _shared_out(layout: JobLayout) -> Iterator[tuple[str, str, JobLayout, bool]]:
    """What is done with sequences and experts."""
    count, left = divmod(layout.micro_batches, layout.context)
    if layout.context > 1 and not left:
        more = replace(
            layout,
            context=1,
            context_method="ulysses",
            micro_batches=count,
            data_shard=layout.data_shard * layout.context,
        )
        yield f"{layout.context_method} {layout.context}", "more replicas", more, True
    if layout.expert > 1:
        yield f"expert {layout.expert}", "all experts on each rank", replace(layout, expert=1), True
    if layout.expert_load > 1:
        even = replace(layout, expert_load=1.0)
        yield f"expert load {layout.expert_load:g}", "balanced experts", even, True


def _without(
    found: SimulatedJob, technique: str, instead: str, layout: JobLayout, *, side_by_side: bool
) -> Contribution:
    config: RunConfig = found.config
    try:
        check(with_layout(config, layout))
        parts = parts_of(config, found.cluster, layout, side_by_side=side_by_side)
        other = simulate_job(config, found.cluster, layout, parts)
    except InputError as error:
        return Contribution(
            technique=technique,
            instead=instead,
            seconds=0.0,
            memory=None,
            fits=False,
            why_not=error.message,
        )
    return Contribution(
        technique=technique,
        instead=instead,
        seconds=other.seconds,
        memory=other.peak,
        fits=other.fits,
    )
