"""The degrees of `[parallel]` and `[pipeline]`: which ranks share what, and what cannot be.

Stages of a pipeline that are laid out each in its own way are written as

    [pipeline]
    stages = [{tensor = 4}, {data_shard = 2, tensor = 2}]     # or ["tensor=4", "data_shard=2 ..."]

Ranks are numbered stage by stage. The widest stage, that whose ranks see most shares of a
micro-batch, has `train.micro_batch_size` sequences on a rank; a rank of another stage has more.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from interlace.config import ParallelConfig, PipelineConfig, RunConfig
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
    return sum(each.stage_ranks for each in stages) if stages else config.parallel.ranks


def _first_ranks(stages: Sequence[ParallelConfig]) -> list[int]:
    """The first rank of each stage."""
    return [sum(each.stage_ranks for each in stages[:number]) for number in range(len(stages))]


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
    number = max(n for n, first in enumerate(_first_ranks(stages)) if first <= rank)
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


def check_degrees(config: RunConfig) -> tuple[ParallelConfig, ...]:
    """Raise InputError for degrees that can never work. Returns `stages_of(config)`."""
    parallel = config.parallel
    if parallel.data_shard < -1 or parallel.data_shard == 0:
        raise InputError(
            f"parallel.data_shard = {parallel.data_shard} must be positive, or -1",
            hint="-1 takes all ranks that the other degrees leave",
        )
    if parallel.reduce == "micro_batch" and parallel.zero != 3:
        raise InputError(
            f"parallel.reduce = 'micro_batch' keeps shards of gradients, and parallel.zero = "
            f"{parallel.zero} keeps them whole",
            hint="set parallel.zero to 3, or parallel.reduce to step",
        )
    _check_experts(config)
    if parallel.pipeline > 1:
        stages = _check_stages(config)
        _check_pipeline(config)
        return stages
    if config.pipeline != PipelineConfig():
        raise InputError(
            f"[pipeline] says how stages run, and parallel.pipeline = {parallel.pipeline}",
            hint="set parallel.pipeline to the number of stages, or remove the table",
        )
    return ()


def _check_experts(config: RunConfig) -> None:
    """What expert parallelism does not go with."""
    model, parallel = config.model, config.parallel
    if parallel.expert == 1:
        if parallel.expert_sends != "each":
            raise InputError(
                f"parallel.expert_sends = {parallel.expert_sends!r} and parallel.expert = 1: "
                "nothing is sent where a rank has all experts",
                hint="set parallel.expert above 1, or leave parallel.expert_sends out",
            )
        return
    given = f"parallel.expert = {parallel.expert}"
    if config.pipeline.stages:
        raise InputError(
            f"{given} and pipeline.stages = {list(config.pipeline.stages)}: experts are dealt to "
            "ranks where all stages are laid out alike",
            hint="set parallel.expert to 1, or leave pipeline.stages out",
        )
    if model.experts.count and model.experts.count % parallel.expert:
        raise InputError(
            f"model.experts.count = {model.experts.count} experts cannot be dealt to {given} ranks",
            hint="set parallel.expert to a divisor of the number of experts",
        )
    _check_expert_ranks(parallel)


def _check_expert_ranks(parallel: ParallelConfig) -> None:
    """Ranks of `ep` are in a row among those that see other tokens, replica by replica."""
    if parallel.expert == 1 or parallel.data_shard == -1:
        return
    shard = parallel.data_shard * parallel.context
    ranks = parallel.data_replicate * shard
    if ranks % parallel.expert or (shard % parallel.expert and parallel.expert % shard):
        raise InputError(
            f"parallel.expert = {parallel.expert} does not fit into the {ranks} ranks that see "
            f"other tokens: data_replicate {parallel.data_replicate} x data_shard "
            f"{parallel.data_shard} x context {parallel.context}",
            hint=f"set parallel.data_shard = {parallel.expert} beside it"
            if ranks == 1
            else "parallel.expert divides data_shard x context, or is a multiple of it that "
            "divides all of these ranks",
        )


def _check_stages(config: RunConfig) -> tuple[ParallelConfig, ...]:
    """Stages that are laid out each in its own way."""
    parallel, stages = config.parallel, stages_of(config)
    if not stages:
        return ()
    if len(stages) != parallel.pipeline:
        raise InputError(
            f"pipeline.stages has {len(stages)} layouts, and parallel.pipeline = "
            f"{parallel.pipeline}",
            hint="list one layout for each stage",
        )
    for name in ("data_replicate", "data_shard", "tensor"):
        if getattr(parallel, name) != 1:
            raise InputError(
                f"pipeline.stages and parallel.{name} = {getattr(parallel, name)} are both given",
                hint=f"leave parallel.{name} out: each stage says its own",
            )
    if config.overlap.decompose == "auto":
        raise InputError(
            'pipeline.stages and overlap.decompose = "auto" cannot go together: graphs of stages '
            "differ, and measuring needs all ranks",
            hint='name a form, such as "ring", or leave it out',
        )
    widest(stages)
    return stages


def _check_pipeline(config: RunConfig) -> None:
    """What stages of a pipeline do not go with."""
    where = f"parallel.pipeline = {config.parallel.pipeline}"
    if config.strands != "2":
        raise InputError(
            f"{where} runs strands as pipeline.schedule says, and strands = {config.strands!r}",
            hint='leave strands at "2"; 1F1B, ZB-V and others run one strand at a time',
        )
    ends = "ends" if config.overlap.passes == "ends" else ""
    for name, wrong in (
        ("compare.steps", config.compare.steps),
        ("compare.check", config.compare.check),
        ("plan.file", config.plan.file),
        ("overlap.passes", ends),
        ("parallel.reduce", _unless(config.parallel.reduce, "step")),
        ("train.reduce_dtype", _unless(config.train.reduce_dtype, "float32")),
    ):
        if wrong:
            raise InputError(
                f"{where} and {name} = {wrong!r} cannot go together",
                hint=f"leave {name} out",
            )


def _unless(value: str, usual: str) -> str:
    """`value`, or nothing if it is the usual one."""
    return "" if value == usual else value


def resolve_layout(config: RunConfig, world_size: int) -> RunConfig:
    """`config` for `world_size` ranks, with a `data_shard` of -1 replaced by a number.

    Raises InputError, showing the product, unless the ranks that exist are those it needs.
    """
    parallel = config.parallel
    if stages := stages_of(config):
        sizes = [stage.stage_ranks for stage in stages]
        if sum(sizes) != world_size:
            raise InputError(
                f"pipeline.stages need {' + '.join(map(str, sizes))} = {sum(sizes)} ranks, and the "
                f"world size is {world_size}",
                hint=f"start {sum(sizes)} ranks (--nproc {sum(sizes)}), or change a stage",
            )
        return config
    if parallel.data_shard == -1:
        others = parallel.ranks
        if world_size % others:
            raise InputError(
                f"parallel.data_shard = -1 takes the rest of {world_size} ranks, and "
                f"{_product(parallel, rest=True)} = {others} does not divide {world_size}",
                hint=f"start a multiple of {others} ranks, or change a degree",
            )
        parallel = replace(parallel, data_shard=world_size // others)
    if parallel.ranks != world_size:
        raise InputError(
            f"the layout needs {parallel.ranks} ranks: {_product(parallel)} = "
            f"{parallel.ranks}, and the world size is {world_size}",
            hint=f"start {parallel.ranks} ranks (--nproc {parallel.ranks}), or change a "
            f"degree so that the product is {world_size}",
        )
    _check_expert_ranks(parallel)
    return replace(config, parallel=parallel)


def _product(parallel: ParallelConfig, *, rest: bool = False) -> str:
    names = ["data_replicate", "data_shard", "context", "tensor"]
    if parallel.pipeline > 1:
        names.insert(0, "pipeline")
    parts = [
        f"parallel.{name} {getattr(parallel, name)}"
        for name in names
        if not (rest and name == "data_shard")
    ]
    return " x ".join(parts)
