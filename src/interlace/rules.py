"""Rules for a RunConfig that need no torch and no data: values that can never work.

Each raises InputError with the field, the value and what to set.
"""

from dataclasses import replace

from interlace.config import (
    ParallelConfig,
    PipelineConfig,
    RunConfig,
    modes_of,
    world_of,
    world_of_stage,
)
from interlace.errors import InputError
from interlace.machine_rules import check_machine
from interlace.model_config import ExpertsConfig
from interlace.model_rules import check_model
from interlace.stage_degrees import stages_of, widest
from interlace.value_rules import check_values


def check(config: RunConfig) -> None:
    """Raise InputError for values that can never work, whatever the machine."""
    check_values(config)
    ways = config.compare.modes
    if config.compare.steps and len(set(ways)) < max(1, len(ways)):
        raise InputError(
            f"compare.modes = {list(ways)} must name ways of running, each once",
            hint='set compare.modes to several of them, as in ["eager", "1", "2"]',
        )
    if config.overlap.pieces and config.overlap.decompose == "off":
        raise InputError(
            f"overlap.pieces = {config.overlap.pieces}, but collectives stay whole",
            hint='set overlap.decompose to "auto" or a form, or overlap.pieces to 0',
        )
    _check_gradient_check(config)
    check_machine(config)
    if config.watchdog.dead_after_s < 2 * config.watchdog.heartbeat_s:
        raise InputError(
            f"watchdog.dead_after_s = {config.watchdog.dead_after_s} is less than two heartbeats "
            f"of {config.watchdog.heartbeat_s} s",
            hint="set watchdog.dead_after_s to at least twice watchdog.heartbeat_s",
        )
    if not 0 <= config.model.dropout < 1:
        raise InputError(
            f"model.dropout = {config.model.dropout!r} must be at least 0 and below 1",
            hint="0 drops nothing",
        )
    _check_layout(config)
    _check_pipeline(config)
    _check_shapes(config)
    of_one = {"eager", "1", "plain-1", "decomposed-1"}
    if (
        config.parallel.pipeline == 1
        and modes_of(config) - of_one
        and config.train.micro_batches < 2
    ):
        raise InputError(
            f"two strands need at least two micro-batches per step, and "
            f"train.micro_batches = {config.train.micro_batches}",
            hint="set train.micro_batches to 2 or more (8 hides most), or strands to 1 and "
            "compare.modes to eager,1",
        )


def _check_gradient_check(config: RunConfig) -> None:
    """What a compiled step cannot be compared with eager PyTorch for."""
    if not config.compare.check:
        return
    if config.strands == "eager":
        raise InputError(
            'compare.check compares a compiled step with eager PyTorch, and strands = "eager"',
            hint="set strands to 1 or 2, or leave --check out",
        )
    if config.model.dropout:
        raise InputError(
            f"compare.check and model.dropout = {config.model.dropout}: a compiled step draws "
            "other masks than eager PyTorch",
            hint="check once with model.dropout 0, then train without --check",
        )


def _check_shapes(config: RunConfig) -> None:
    model = config.model
    if model.source == "hugging_face":
        _check_hugging_face(config)
        return
    check_model(config)
    _check_tensor(config)
    _check_context(config)


def _check_hugging_face(config: RunConfig) -> None:
    """The model's own shape is checked when it is built."""
    if not config.model.config:
        raise InputError(
            "model.source = 'hugging_face' needs a model",
            hint="set model.config to a folder with a config.json",
        )
    if config.model.experts != ExpertsConfig():
        raise InputError(
            "[model.experts] and model.source = 'hugging_face' are both given, and that model has "
            "the experts that its config.json says",
            hint="leave [model.experts] out",
        )
    if config.parallel.context > 1:
        raise InputError(
            f"parallel.context = {config.parallel.context} needs attention that Interlace can "
            "replace, and model.source = 'hugging_face' runs the model as it is",
            hint="set parallel.context to 1",
        )


def _check_tensor(config: RunConfig) -> None:
    model, tensor = config.model, config.parallel.tensor
    shares = {
        "model.heads": model.heads,
        "model.ffn_width": model.ffn_width,
        "data.sequence_length": config.data.sequence_length,
        "model.vocab_size": model.vocab_size,
    }
    for name, size in shares.items():
        if size % tensor:
            raise InputError(
                f"{name} = {size} cannot be divided among parallel.tensor = {tensor} ranks",
                hint=f"set {name} to a multiple of {tensor}, or parallel.tensor to a divisor",
            )
    if model.kv_heads % tensor and tensor % model.kv_heads:
        raise InputError(
            f"model.kv_heads = {model.kv_heads} heads can neither be divided among nor repeated on "
            f"parallel.tensor = {tensor} ranks",
            hint="set one of them to a multiple of the other",
        )


def _check_context(config: RunConfig) -> None:
    parallel, model = config.parallel, config.model
    if parallel.context == 1:
        return
    ring = parallel.context_method == "ring"
    pieces = parallel.tensor * parallel.context * (2 if ring else 1)
    if config.data.sequence_length % pieces:
        twice = " x 2 (ring)" if ring else ""
        raise InputError(
            f"data.sequence_length = {config.data.sequence_length} cannot be divided into "
            f"{pieces} pieces: parallel.context = {parallel.context} x parallel.tensor = "
            f"{parallel.tensor}{twice}",
            hint=f"set data.sequence_length to a multiple of {pieces}",
        )
    heads = model.heads // parallel.tensor
    if not ring and heads % parallel.context:
        raise InputError(
            f"ulysses splits the {heads} query heads of a rank (model.heads = {model.heads} / "
            f"parallel.tensor = {parallel.tensor}) among parallel.context = {parallel.context}",
            hint="set parallel.context to a divisor, or parallel.context_method to ring",
        )


def _check_layout(config: RunConfig) -> None:
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
    if config.train.recompute == "budget" and not config.train.recompute_mib:
        raise InputError(
            "train.recompute = 'budget' needs a budget",
            hint="set train.recompute_mib to what one micro-batch may keep for its backward",
        )


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


def _check_pipeline(config: RunConfig) -> None:
    stages = config.parallel.pipeline
    if stages == 1:
        if config.pipeline != PipelineConfig():
            raise InputError(
                f"[pipeline] says how stages run, and parallel.pipeline = {stages}",
                hint="set parallel.pipeline to the number of stages, or remove the table",
            )
        return
    where = f"parallel.pipeline = {stages}"
    _check_stages(config)
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


def _check_stages(config: RunConfig) -> None:
    """Stages that are laid out each in its own way."""
    parallel, stages = config.parallel, stages_of(config)
    if not stages:
        return
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
    for stage in stages:
        _check_shapes(replace(config, parallel=stage))


def _unless(value: str, usual: str) -> str:
    """`value`, or nothing if it is the usual one."""
    return "" if value == usual else value


def resolve_layout(config: RunConfig, world_size: int) -> RunConfig:
    """`config` for `world_size` ranks, with a `data_shard` of -1 replaced by a number.

    Raises InputError, showing the product, unless the ranks that exist are those it needs.
    """
    parallel = config.parallel
    if stages := stages_of(config):
        sizes = [world_of_stage(stage) for stage in stages]
        if sum(sizes) != world_size:
            raise InputError(
                f"pipeline.stages need {' + '.join(map(str, sizes))} = {sum(sizes)} ranks, and the "
                f"world size is {world_size}",
                hint=f"start {sum(sizes)} ranks (--nproc {sum(sizes)}), or change a stage",
            )
        return config
    if parallel.data_shard == -1:
        others = world_of(parallel)
        if world_size % others:
            raise InputError(
                f"parallel.data_shard = -1 takes the rest of {world_size} ranks, and "
                f"{_product(parallel, rest=True)} = {others} does not divide {world_size}",
                hint=f"start a multiple of {others} ranks, or change a degree",
            )
        parallel = replace(parallel, data_shard=world_size // others)
    if world_of(parallel) != world_size:
        raise InputError(
            f"the layout needs {world_of(parallel)} ranks: {_product(parallel)} = "
            f"{world_of(parallel)}, and the world size is {world_size}",
            hint=f"start {world_of(parallel)} ranks (--nproc {world_of(parallel)}), or change a "
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
