"""All layouts of a job on so many devices that a run file may have.

A field of the run file that is not at its default is kept: `--parallel.tensor 8` leaves the rest to
the search. Tensor ranks stay within a host. Sequences are shared where they are long, and experts
are dealt to any number of ranks that their number and the ranks allow. Of schedules that differ in
memory alone the one that takes less is listed (1F1B, not GPipe).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from interlace.config import ParallelConfig, PipelineConfig, RunConfig, TrainConfig
from interlace.errors import InputError
from interlace.hardware.cluster import Cluster
from interlace.model_config import expert_width_of
from interlace.schedules.finder import Schedule, find, names, of_strands
from interlace.strategy.job_layout import JobLayout, refuse_load, refuse_unknown

MOST_CHUNKS = 8
"""Chunks of a rank, at most, in schedules that run any number: a choice."""
LARGEST_MICRO_BATCH = 16
"""Sequences: a choice, as more fill a GPU no better."""
_SEARCHED = (
    "data_replicate",
    "data_shard",
    "context",
    "context_method",
    "tensor",
    "expert",
    "pipeline",
    "zero",
    "reduce",
)
"""Fields of `[parallel]`."""
LEAST_TOKENS = 8192
"""Of a sequence on a rank, below which sequences are not shared further: a choice, as shorter parts
leave less to hide exchanges under."""
_METHODS: tuple[Literal["ulysses", "ring"], ...] = ("ulysses", "ring")
_RECOMPUTE: tuple[Literal["none", "attention", "layer"], ...] = ("none", "attention", "layer")


@dataclass(frozen=True, kw_only=True)
class LayoutSpace:
    """What is searched."""

    config: RunConfig
    cluster: Cluster
    devices: int
    global_batch: int
    """Sequences of a step, of all replicas."""
    expert_load: float = 1.0
    """Rows of the fullest expert over the mean of all."""

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InputError(
                f"--global-batch {self.global_batch} is no number of sequences", hint="1 or more"
            )
        refuse_unknown(self.config)
        refuse_load(self.config, self.expert_load)

    @cached_property
    def kept(self) -> dict[str, Any]:
        """Fields of the run file that stay as they are, by name."""
        parallel, train = self.config.parallel, self.config.train
        usual, plain = ParallelConfig(), TrainConfig()
        found: dict[str, Any] = {
            name: getattr(parallel, name)
            for name in _SEARCHED
            if getattr(parallel, name) not in (getattr(usual, name), -1)
        }
        schedule = find(self.config.pipeline.schedule).name
        if schedule != PipelineConfig().schedule:
            found["schedule"] = schedule
        if train.recompute != plain.recompute:
            found["recompute"] = train.recompute
        if train.micro_batch_size != plain.micro_batch_size:
            found["micro_batch"] = train.micro_batch_size
        if self.config.strands == "1":
            found["strands"] = "1"
        return found

    def layouts(self) -> Iterator[JobLayout]:
        """All of them, the plainest first."""
        for tensor in self._of("tensor", self._tensor_degrees()):
            for context, method in self._contexts(tensor):
                each = tensor * context
                for pipeline in self._of("pipeline", self._stages(each)):
                    if pipeline > self.config.model.layers or self.devices % (each * pipeline):
                        continue
                    replicas = self.devices // (each * pipeline)
                    if self.global_batch % replicas == 0:
                        shared = JobLayout(
                            context=context, context_method=method, tensor=tensor,
                            pipeline=pipeline, tied_head=self.config.model.tied_head,
                            expert_load=self.expert_load,
                            decompose=self.config.overlap.decompose,
                            pieces=self.config.overlap.pieces,
                        )  # fmt: skip
                        yield from self._dealt(shared, replicas)

    def _contexts(self, tensor: int) -> Iterator[tuple[int, Literal["ulysses", "ring"]]]:
        """Ranks of a sequence, and what they exchange."""
        model, length = self.config.model, self.config.data.sequence_length
        kept = self.kept.get("context")
        for context in self._of("context", _divisors(max(1, length // LEAST_TOKENS))):
            if context == 1:
                yield 1, "ulysses"
                continue
            if self.devices % (tensor * context):
                continue
            for method in self._of("context_method", _METHODS if kept is None else ("ulysses",)):
                pieces = tensor * context * (2 if method == "ring" else 1)
                heads = model.heads // tensor
                if length % pieces == 0 and (method == "ring" or heads % context == 0):
                    yield context, method

    def _dealt(self, split: JobLayout, replicas: int) -> Iterator[JobLayout]:
        share, pipeline = self.global_batch // replicas, split.pipeline
        for micro_batch in self._of("micro_batch", _divisors(share)):
            if micro_batch > LARGEST_MICRO_BATCH and "micro_batch" not in self.kept:
                continue
            if share % micro_batch:
                continue
            count = share // micro_batch
            for schedule in self._schedules(pipeline, count):
                for shared in self._shared(split, replicas):
                    for recompute in self._of("recompute", _RECOMPUTE):
                        if recompute == "attention" and split.context_method == "ring":
                            continue  # a ring keeps what it needs
                        yield replace(
                            shared,
                            schedule=schedule,
                            micro_batch=micro_batch,
                            micro_batches=count,
                            recompute=recompute,
                        )

    def _shared(self, split: JobLayout, replicas: int) -> Iterator[JobLayout]:
        """Ways to share weights over replicas: shards of a few sizes, by ZeRO-1 and ZeRO-3; and to
        deal experts to those."""
        sizes = [size for size in _divisors(replicas) if _is_round(size, replicas)]
        for shard in self._of("data_shard", sizes):
            if replicas % shard:
                continue
            replicate = replicas // shard
            if self.kept.get("data_replicate", replicate) != replicate:
                continue
            whole = replace(split, data_replicate=replicate, data_shard=shard)
            for zero in self._of("zero", (1, 3) if shard > 1 else (3,)):
                each = zero == 3 and shard > 1 and split.pipeline == 1
                for reduce in self._of("reduce", ("step", "micro_batch") if each else ("step",)):
                    for expert in self._of("expert", self._expert_degrees(whole)):
                        yield replace(whole, zero=zero, reduce=reduce, expert=expert)

    def _expert_degrees(self, layout: JobLayout) -> list[int]:
        """Into how many parts experts can be dealt, by the rule of `rules.check`."""
        count, group = self.config.model.experts.count, layout.group
        ranks = layout.data_replicate * group
        return [
            e
            for e in _divisors(max(1, count))
            if ranks % e == 0 and (group % e == 0 or e % group == 0)
        ]

    def _schedules(self, pipeline: int, micro_batches: int) -> tuple[str, ...]:
        if pipeline == 1:
            both = micro_batches > 1 and "strands" not in self.kept
            return tuple(of_strands(count).name for count in ((1, 2) if both else (1,)))
        if "schedule" in self.kept:
            return (self.kept["schedule"],)
        each = self.config.model.layers // pipeline
        found: list[str] = []
        for schedule in _proposed():
            if not schedule.declared.any_chunks:
                found += [schedule.name] if schedule.chunks <= each else []
            elif micro_batches % pipeline == 0:  # other numbers leave holes in their groups
                chunks = range(schedule.chunks, min(each, MOST_CHUNKS) + 1)
                found += [f"{schedule.name}(chunks={c})" for c in chunks if each % c == 0]
        return tuple(found)

    def _stages(self, each: int) -> list[int]:
        """Numbers of stages, where so many ranks share a layer. Stages run strands by a
        schedule."""
        return [1] if "strands" in self.kept else _divisors(self.devices // each)

    def _tensor_degrees(self) -> list[int]:
        """Those that split the model."""
        model, length = self.config.model, self.config.data.sequence_length
        split = [model.heads, model.ffn_width, length, model.vocab_size]
        split += [expert_width_of(model), model.experts.shared_width]
        return [
            t
            for t in _divisors(self.devices)
            if t <= self.cluster.devices_per_host
            and not any(n % t for n in split)
            and (model.kv_heads % t == 0 or t % model.kv_heads == 0)
        ]

    def _of(self, name: str, values: Any) -> tuple[Any, ...]:
        return (self.kept[name],) if name in self.kept else tuple(values)


@lru_cache(maxsize=1)
def _proposed() -> tuple[Schedule, ...]:
    """Schedules of pipelines that are worth trying, those of few chunks first."""
    found = [schedule for schedule in map(find, names()) if schedule.declared.proposed]
    return tuple(sorted(found, key=lambda each: (each.declared.any_chunks, each.chunks)))


def _is_round(size: int, replicas: int) -> bool:
    """Powers of eight, and all: between these, times change little."""
    return size in (1, 8, 64, 512, replicas)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
