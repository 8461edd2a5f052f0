"""`interlace plan`: plan a run without starting it, with no second process and no weights.

The model is built from fake tensors in a fake world of the right size, traced as a rank would, and
planned on computed costs or on those of a file (`plan_costs`).
"""

import json as json_format
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from interlace import run_files
from interlace.claims import refuse_in_live_run
from interlace.compiled import Compilation, StepSettings
from interlace.config import RunConfig
from interlace.data.tokens import open_tokenizer
from interlace.decompose.rewrite.apply import Decompose
from interlace.degrees import resolve_layout
from interlace.errors import InputError
from interlace.experts.merged_sends import expected_sends
from interlace.garbage import no_collections
from interlace.graphs.recompute import policy_of
from interlace.graphs.torch_private import end_fake_world, fake_tensor_mode, init_fake_world
from interlace.hardware.cluster import Cluster
from interlace.ir.noise import noise_of
from interlace.ir.plan import to_text
from interlace.models.hugging_face_config import overridden_shape, published_shape
from interlace.models.transformers_model import published_sizes
from interlace.parallel.data import data_layout, gathered_in_stage
from interlace.parallel.meshes import build_meshes
from interlace.parallel.tensor import loss_context
from interlace.report.plan_figures import compare_searches
from interlace.report.plan_tables import plan_json, plan_summary
from interlace.report.stage_tables import stages_json, stages_summary
from interlace.rules import check
from interlace.run_files import write_whole
from interlace.runtime.candidates import Candidates, trace_candidates
from interlace.runtime.memory_limit import constant_bytes, memory_limits
from interlace.runtime.stage_gathers import timed_graphs
from interlace.runtime.traced_strands import Strands, build_strands
from interlace.schedules.finder import find, names, of_strands
from interlace.schedules.schedule_text import write_schedule
from interlace.train.built_model import build_module, vocabulary
from interlace.train.plan_costs import (
    cluster_of,
    computed_costs,
    decompose_of,
    measured_costs,
    read_costs,
)
from interlace.train.session import DTYPES
from interlace.train.stage_plans import StagePlanner, eager_enough, machine_for, steps_of_all
from interlace.train.weights import cast_parameters


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
) -> int:
    """Plan `config`: tables on stderr, the plan on stdout or in `output`; more in other files.
    Without a file of costs they are those of `cluster`, or else of the machine of the run file.
    `every_search` plans by the searches that were not asked for too, to compare them.

    Raises InputError for a configuration, a cost file, a cluster or an output that cannot work.
    """
    check(config)
    given, config = config, published_shape(config)
    if overridden := overridden_shape(given, config):
        _say(overridden)
    _check_request(config, cost, interpolate=interpolate)
    if cost is None:
        cluster = cluster or config.plan.cluster
    on = cluster_of(config, cluster, cost) if cluster else None
    _check_outputs({"--output": output, "--json": json, "--picture": picture}, cost)
    if config.parallel.pipeline > 1:
        return _plan_stages(config, output, json=json, picture=picture, cluster=on)
    table = read_costs(cost) if cost else None
    (_, layers, _), ranks = _shape(config), config.parallel.ranks
    with _stage(f"tracing {layers} layers, one of {ranks} ranks"):
        candidates = trace_fake(config, on)
    whole = candidates.whole
    if whole.not_repeated:
        _say(f"every block was traced: {whole.not_repeated}")
    if table is None:
        costs, origin = computed_costs(config, whole.op_graphs, on)
    else:
        costs, origin = measured_costs(table, str(cost), whole, interpolate=interpolate)
    _say(f"costs: {origin}")
    always = constant_bytes(config.parallel, config.train.dtype, whole.module, whole.data)
    limits = memory_limits(config.plan, always)
    settings = StepSettings(plan=config.plan, overlap=config.overlap, limits=limits)
    strands = Compilation(candidates, settings, lambda _: costs).chosen()
    if strands.listing is not None:
        _say("\n".join(strands.listing.lines()))
    graphs = strands.op_graphs
    comparison = compare_searches(
        graphs,
        costs,
        chosen=config.plan.search,
        micro_batches=config.train.micro_batches,
        limits=limits,
        constant_bytes=always,
        stage=_stage,
        every=every_search,
    )
    _say(f"\n{plan_summary(comparison)}\n")
    if json is not None:
        about = {"source": costs.source, "digest": costs.digest, "machine": costs.machine}
        about |= {"file": str(cost) if cost else "", "description": origin}
        about |= {"noise": noise_of(costs)}
        _write(json, plan_json(comparison, costs=about, run=config.as_dict()).encode())
    if picture is not None:
        from interlace.report.plan_picture import plan_png  # noqa: PLC0415  imports matplotlib

        subtitle = f"{describe_model(config)}; costs: {origin.splitlines()[0]}"
        _write(picture, plan_png(comparison, subtitle=subtitle))
    text = to_text(comparison.best.plan, graphs)
    _give(text, output)
    return 0


def _plan_stages(
    config: RunConfig,
    output: Path | None,
    *,
    json: Path | None,
    picture: Path | None,
    cluster: Cluster | None,
) -> int:
    """Simulate a pipeline by its schedule and by all others; the plan is a list of actions."""
    own = find(config.pipeline.schedule)
    (_, layers, _), ranks = _shape(config), config.parallel.ranks
    with _stage(f"tracing {layers} layers, one of {ranks} ranks"):
        strands = trace_fake(config, cluster).all
    costs, origin = computed_costs(config, timed_graphs(strands), cluster)
    _say(f"costs: {origin}")
    held = constant_bytes(config.parallel, config.train.dtype, strands.module, None)
    limits = memory_limits(config.plan, held)
    settings = StepSettings(plan=config.plan, overlap=config.overlap, limits=limits)
    machine = machine_for(config, cluster)
    planner = StagePlanner(config, strands, costs, settings, machine, strands.data)
    with _stage("simulating schedules"):
        chosen = planner.step(own, config.pipeline.split_at)
        steps, left_out = steps_of_all(planner, map(find, names()), chosen)
        steps = sorted((*steps, *eager_enough(planner, steps)), key=lambda each: each.step.step_ns)
    _say(f"\n{stages_summary(chosen, steps, config.train.micro_batches)}\n")
    for reason in left_out.values():
        _say(f"left out: {reason}")
    if json is not None:
        data = stages_json(chosen, steps, left_out, costs=origin, run=config.as_dict())
        _write(json, (json_format.dumps(data, indent=1) + "\n").encode())
    if picture is not None:
        from interlace.report.pipeline_picture import pipeline_png  # noqa: PLC0415  matplotlib

        title = f"{own.name}: {describe_model(config)}"
        _write(picture, pipeline_png(chosen.actions, chosen.step, title=title))
    text = write_schedule(chosen.actions)
    _give(text, output)
    return 0


def _give(text: str, output: Path | None) -> None:
    """Write a plan to a file or to standard output; to a terminal it would hide the tables."""
    if output is not None:
        _write(output, text.encode())
    elif sys.stdout.isatty():
        lines = text.count("\n")
        _say(f"the plan has {lines:,} lines: -o FILE writes them, and | less shows them")
    else:
        sys.stdout.write(text)


@no_collections()
def trace_fake(config: RunConfig, cluster: Cluster | None = None) -> Candidates:
    """The graphs of one rank of `config` for two strands, traced on fake tensors; of a pipeline
    those of the whole model, not cut, with how ranks share weights that they will gather in
    chunks. Collectives are decomposed by times of `cluster`, or else of
    the machine of the run file."""
    ranks, in_stages = config.parallel.ranks, config.parallel.pipeline > 1
    config = resolve_layout(config, ranks)
    tensor = config.parallel.tensor
    tokens = -(-open_tokenizer(config.data.tokenizer).vocab_size // tensor) * tensor
    vocab_size = vocabulary(config, tokens)
    init_fake_world(ranks)
    try:
        meshes = build_meshes(config.parallel, "cpu")
        with fake_tensor_mode():
            module = build_module(config, meshes, vocab_size, torch.device("cpu"))
            if config.train.dtype != "float32":
                cast_parameters(module, DTYPES[config.train.dtype])
            shape = (
                config.train.micro_batch_size,
                config.data.sequence_length // config.parallel.context,
            )
            # Two tensors: one given twice would be traced as a single input.
            text, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
            reduce_dtype = DTYPES[config.train.reduce_dtype]
            trace = partial(
                build_strands,
                module,
                (text, targets),
                meshes.axis_of_group,
                data=None
                if in_stages
                else data_layout(module, config.parallel, meshes, reduce_dtype),
                recompute=policy_of(config.train),
                repeat=True,
            )
            staged = gathered_in_stage(config.parallel, module, meshes)

            def traced(decompose: Decompose | None) -> Strands:
                found = trace(decompose=decompose)
                return replace(found, data=staged) if in_stages else found

            with loss_context(meshes.tensor):
                return trace_candidates(
                    traced,
                    decompose_of(config, cluster),
                    config.overlap.passes,
                    schedule=of_strands(1 if in_stages else 2),
                )
    finally:
        end_fake_world()


def describe_model(config: RunConfig) -> str:
    """`llama, 80 layers of width 8192, sequence 8192 x 1, bfloat16, 64 ranks`; with experts also
    `2 of 8 experts`, and what merged sends save of the rows where every choice is as likely."""
    (architecture, layers, width), train = _shape(config), config.train
    experts = config.model.experts
    routed = f", {experts.chosen} of {experts.count} experts" if experts.count else ""
    if experts.count and config.parallel.expert_sends == "merged":
        rows = 1000 * experts.chosen
        sends = expected_sends(1000, experts.chosen, experts.count, config.parallel.expert)
        routed += f" ({1 - sends / rows:.0%} fewer rows by merged sends)"
    return (
        f"{architecture}, {layers} layers of width {width}{routed}, sequence "
        f"{config.data.sequence_length} x {train.micro_batch_size}, {train.dtype}, "
        f"{config.parallel.ranks} ranks"
    )


def _shape(config: RunConfig) -> tuple[str, int, int]:
    """(architecture, layers, width) of the model that the run trains."""
    model = config.model
    if model.source == "hugging_face":
        return published_sizes(model.config)
    return model.architecture, model.layers, model.width


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
    if config.parallel.pipeline > 1 and cost is not None:
        raise InputError(
            f"--cost {cost}: no pipeline is profiled, and parallel.pipeline = "
            f"{config.parallel.pipeline}",
            hint="leave it out, and give --cluster, or hardware.* and link.*",
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


def _check_outputs(outputs: Mapping[str, Path | None], cost: Path | None) -> None:
    """Refuse names that cannot be written before a minute of work instead of after it."""
    taken = {cost.resolve(): "--cost"} if cost else {}
    for option, path in outputs.items():
        if path is None:
            continue
        whole = path.resolve()
        if whole.exists() and not whole.is_file():
            what = "a folder" if whole.is_dir() else "not a regular file"
            raise InputError(f"{option} {path} is {what}", hint="give the name of a file")
        if whole in taken:
            raise InputError(
                f"{taken[whole]} and {option} are both {path}", hint="give each a name of its own"
            )
        taken[whole] = option
        refuse_in_live_run(whole)
        above = next(parent for parent in whole.parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise InputError(
                f"{option} {path}: cannot write below {above}", hint="name another file"
            )
    picture = outputs["--picture"]
    if picture is not None and picture.suffix != ".png":
        raise InputError(f"--picture {picture} is not a .png file", hint="end its name in .png")


def _write(path: Path, content: bytes) -> None:
    write_whole(path, content)
    _say(f"wrote {path}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _stage(words: str) -> Iterator[None]:
    """`words ... 3.2 s` on standard error."""
    start = time.perf_counter()
    print(f"{words} ... ", end="", file=sys.stderr, flush=True)
    try:
        yield
    except BaseException:
        _say("")
        raise
    _say(f"{time.perf_counter() - start:.1f} s")
