"""Stages of a pipeline that are laid out each in its own way, as the run file has them.

    [pipeline]
    stages = [{tensor = 4}, {data_shard = 2, tensor = 2}]     # or ["tensor=4", "data_shard=2 ..."]

Ranks are numbered stage by stage. The widest stage, that whose ranks see most shares of a
micro-batch, has `train.micro_batch_size` sequences on a rank; a rank of another stage has more.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from interlace.config import ParallelConfig, RunConfig, world_of, world_of_stage
from interlace.errors import InputError, nearest

_DEGREES = ("data_replicate", "data_shard", "tensor")
"""What a stage says of itself; `parallel` has the rest."""


def stages_of(config: RunConfig) -> tuple[ParallelConfig, ...]:
    """The layout of each stage; none where all are alike. Raises InputError for what is no
    layout."""
    return tuple(
        _parsed(config.parallel, number, text) for number, text in enumerate(config.pipeline.stages)
    )


def ranks_of(config: RunConfig) -> int:
    """Ranks that a run needs; a `data_shard` of -1 counts as 1."""
    stages = stages_of(config)
    return sum(map(world_of_stage, stages)) if stages else world_of(config.parallel)


def first_ranks(stages: Sequence[ParallelConfig]) -> list[int]:
    """The first rank of each stage."""
    return [sum(map(world_of_stage, stages[:number])) for number in range(len(stages))]


def vocabulary_divisor(config: RunConfig) -> int:
    """Of what the rows of an embedding are a multiple, alike on all ranks."""
    return lcm(*(stage.tensor for stage in stages_of(config) or (config.parallel,)))


def widest(stages: Sequence[ParallelConfig]) -> int:
    """Shares of a micro-batch in the stage that has most. Raises InputError where another stage
    cannot have whole multiples of these."""
    shares = [stage.data_replicate * stage.data_shard for stage in stages]
    for number, count in enumerate(shares):
        if max(shares) % count:
            raise InputError(
                f"pipeline.stages deal a micro-batch to {' and '.join(map(str, shares))} ranks, "
                f"and {max(shares)} shares cannot be dealt to the {count} of stage {number}",
                hint="make data_replicate x data_shard of each stage a divisor of the largest",
            )
    return max(shares)


def of_rank(config: RunConfig, rank: int) -> RunConfig:
    """The run as one rank sees it: `parallel` is the layout of its stage, and
    `train.micro_batch_size` counts the sequences of a micro-batch that the rank has."""
    stages = stages_of(config)
    if not stages:
        return config
    number = max(n for n, first in enumerate(first_ranks(stages)) if first <= rank)
    own = stages[number]
    share = widest(stages) // (own.data_replicate * own.data_shard)
    size = config.train.micro_batch_size * share
    return replace(config, parallel=own, train=replace(config.train, micro_batch_size=size))


def _parsed(parallel: ParallelConfig, number: int, text: str) -> ParallelConfig:
    degrees = dict.fromkeys(_DEGREES, 1)
    for word in text.split():
        name, _, value = word.partition("=")
        where = f"pipeline.stages has {text!r} for stage {number}"
        if name not in _DEGREES:
            raise InputError(f"{where}, and {name!r} is no degree", hint=nearest(name, _DEGREES))
        if not value.isdigit() or int(value) < 1:
            raise InputError(
                f"{where}, and {value!r} is not a number of ranks", hint=f"write {name}=2"
            )
        degrees[name] = int(value)
    replicate, shard, tensor = degrees.values()
    return replace(parallel, data_replicate=replicate, data_shard=shard, tensor=tensor)
