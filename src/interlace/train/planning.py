"""`interlace plan`: plan a run without starting it, with no second process and no weights.

The graphs of one rank (`fake_trace`) are planned on computed costs or on those of a file
(`plan_costs`).
"""

from pathlib import Path

from interlace import run_files
from interlace.compiled import Compilation, StepSettings
from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.ir.noise import noise_of
from interlace.ir.plan import to_text
from interlace.models.hugging_face_config import overridden_shape, published_shape
from interlace.report.plan_figures import compare_searches
from interlace.report.plan_tables import plan_json, plan_summary
from interlace.rules import check
from interlace.runtime.memory_limit import constant_bytes, memory_limits
from interlace.train.fake_trace import describe_model, shape_of, trace_fake
from interlace.train.pipeline_command import PipelineWish, plan_stages
from interlace.train.plan_costs import OperatorTimes, cluster_of, read_costs
from interlace.train.plan_output import check_outputs, give, say, timed, write


def plan_command(
    config: RunConfig,
    output: Path | None,
    *,
    cost: Path | None = None,
    interpolate: bool = False,
    json: Path | None = None,
    picture: Path | None = None,
    cluster: str = "",
    every_search: bool = False,
    pipeline_search: PipelineWish | None = None,
) -> int:
    """Plan `config`: tables on stderr, the plan on stdout or in `output`; more in other files.
    Without a file of costs they are those of `cluster`, or else of the machine of the run file.
    `every_search` plans by the searches that were not asked for too, to compare them, and
    `pipeline_search` asks for a pipeline that is made for the model.

    Raises InputError for a configuration, a cost file, a cluster or an output that cannot work.
    """
    check(config)
    given, config = config, published_shape(config)
    if overridden := overridden_shape(given, config):
        say(overridden)
    _check_request(config, cost, interpolate=interpolate)
    if cost is None:
        cluster = cluster or config.plan.cluster
    on = cluster_of(config, cluster, cost) if cluster else None
    check_outputs({"--output": output, "--json": json, "--picture": picture}, cost)
    times = OperatorTimes(read_costs(cost) if cost else None, cost, on, interpolate)
    if config.parallel.pipeline > 1:
        return plan_stages(config, times, output, json=json, picture=picture, wish=pipeline_search)
    (_, layers, _), ranks = shape_of(config), config.parallel.ranks
    with timed(f"tracing {layers} layers, one of {ranks} ranks"):
        candidates = trace_fake(config, on)
    whole = candidates.whole
    if whole.not_repeated:
        say(f"every block was traced: {whole.not_repeated}")
    costs, origin = times.of(config, whole)
    say(f"costs: {origin}")
    always = constant_bytes(config.parallel, config.train.dtype, whole.module, whole.data)
    limits = memory_limits(config.plan, always)
    settings = StepSettings(plan=config.plan, overlap=config.overlap, limits=limits)
    strands = Compilation(candidates, settings, lambda _: costs).chosen()
    if strands.listing is not None:
        say("\n".join(strands.listing.lines()))
    graphs = strands.op_graphs
    comparison = compare_searches(
        graphs,
        costs,
        chosen=config.plan.search,
        micro_batches=config.train.micro_batches,
        limits=limits,
        constant_bytes=always,
        stage=timed,
        every=every_search,
    )
    say(f"\n{plan_summary(comparison)}\n")
    if json is not None:
        about = {"source": costs.source, "digest": costs.digest, "machine": costs.machine}
        about |= {"file": str(cost) if cost else "", "description": origin}
        about |= {"noise": noise_of(costs)}
        write(json, plan_json(comparison, costs=about, run=config.as_dict()).encode())
    if picture is not None:
        from interlace.report.plan_picture import plan_png  # noqa: PLC0415  imports matplotlib

        subtitle = f"{describe_model(config)}; costs: {origin.splitlines()[0]}"
        write(picture, plan_png(comparison, subtitle=subtitle))
    text = to_text(comparison.best.plan, graphs)
    give(text, output)
    return 0


def _check_request(config: RunConfig, cost: Path | None, *, interpolate: bool) -> None:
    if config.train.micro_batches < 2 and config.parallel.pipeline == 1:
        raise InputError(
            "a plan pairs two micro-batches, and train.micro_batches = 1",
            hint="set train.micro_batches to 2 or more",
        )
    if config.pipeline.stages:
        raise InputError(
            f"pipeline.stages = {list(config.pipeline.stages)}: stages that are laid out each in "
            "its own way are not planned without running them",
            hint="plan with equal stages (parallel.*), or run interlace train",
        )
    if config.plan.file:
        raise InputError(
            f"plan.file = {config.plan.file!r} is a plan already",
            hint="leave it out to make a new one: --plan.file ''",
        )
    if interpolate and cost is None:
        raise InputError(
            "--interpolate estimates what a cost file lacks, and none was given",
            hint=f"add --cost {run_files.COSTS}",
        )
