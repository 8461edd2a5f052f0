"""`interlace plan`: find the plan of a run without training."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from interlace.cli.options import RunFile, RunOptions, Verbose
from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.garbage import no_collections


@dataclass(frozen=True)
class SearchWanted:
    """What is searched for besides the plan of the run."""

    compare_searches: Annotated[bool, Parameter(negative="")] = False
    """Also plan by the searches that plan.search does not name, and show what each gives."""
    search_pipeline: Annotated[bool, Parameter(negative="")] = False
    """With parallel.pipeline: also search for a pipeline that is made for this model (where it is
    cut, which rank has which chunk, the order), and give that as the plan."""
    memory_gib: float = 0.0
    """With --search-pipeline: most that a rank may hold and keep; by default what --cluster says,
    or else any amount."""


SearchWantedOptions = Annotated[SearchWanted, Parameter(name="*")]
"""Each of them as a flag."""


def plan(
    run: RunFile,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    cluster: str = "",
    cost: Path | None = None,
    interpolate: Annotated[bool, Parameter(negative="")] = False,
    json: Path | None = None,
    picture: Path | None = None,
    searches: SearchWantedOptions = SearchWanted(),
    global_batch: int = 0,
    expert_load: float = 1.0,
    config: RunOptions = RunConfig(),  # noqa: B008  frozen
    verbose: Verbose = False,
) -> int:
    """Find the order of operators for a run without training, and print it; with --global-batch
    the layout of a job on a cluster instead, as a run file.

    Parameters
    ----------
    run
        A TOML run file, or the name of a preset. In its place --model NAME takes the shape of a
        model alone (llama-70b, mixtral-8x7b), and --sequence N is short for
        --data.sequence_length N.
    output
        Write the plan to this file, for plan.file of a later run; with --global-batch the run file.
    cluster
        Compute times for this cluster: a TOML file, or a preset (a40, a800, h100, h200), in place
        of hardware.*, link.* and --cost. With --global-batch the number of devices stands behind
        it: h100x512.
    cost
        Times from this file, written by `interlace profile`, instead of computed ones.
    interpolate
        Estimate operators that the cost file does not have.
    json
        Also write the plan with all figures here.
    picture
        Also draw the plan's timeline to this .png.
    global_batch
        Sequences of a step, of all replicas: search how to split the job over the devices of
        --cluster. Fields of [parallel], pipeline.schedule, train.micro_batch_size and
        train.recompute that are not at their defaults are kept.
    expert_load
        With --global-batch: rows of the fullest expert over the mean of all, as the metric
        expert_imbalance of a run says; 1 is balanced.
    verbose
        Show where an error came from.
    """
    if global_batch:
        from interlace.cli.strategy_command import plan_strategy  # noqa: PLC0415  starts faster

        _refuse(cost=cost, interpolate=interpolate, picture=picture, **asdict(searches))
        return plan_strategy(
            config, cluster=cluster, global_batch=global_batch, expert_load=expert_load,
            output=output, json=json,
        )  # fmt: skip
    _refuse_load(expert_load)
    _check_pipeline_search(config, searches)
    with no_collections():
        from interlace.train.pipeline_command import PipelineWish  # noqa: PLC0415
        from interlace.train.planning import plan_command  # noqa: PLC0415  imports torch

        return plan_command(
            config, output, cluster=cluster, cost=cost, interpolate=interpolate, json=json,
            picture=picture, every_search=searches.compare_searches,
            pipeline_search=PipelineWish(searches.memory_gib) if searches.search_pipeline else None,
        )  # fmt: skip


def _check_pipeline_search(config: RunConfig, flags: SearchWanted) -> None:
    """Refuse what would say nothing, and limits that are none."""
    if flags.search_pipeline and config.parallel.pipeline == 1:
        raise InputError(
            "--search-pipeline looks for a pipeline, and parallel.pipeline = 1",
            hint="set parallel.pipeline to the number of stages",
        )
    if flags.memory_gib and not flags.search_pipeline:
        raise InputError(
            f"--memory-gib {flags.memory_gib:g} is for --search-pipeline, which is not given",
            hint="add it, or leave --memory-gib out",
        )
    if not 0 <= flags.memory_gib < 1e6:
        raise InputError(f"--memory-gib {flags.memory_gib:g} is no size", hint="GiB of a rank")


def _refuse_load(expert_load: float) -> None:
    if expert_load != 1:
        raise InputError(
            f"--expert-load {expert_load:g} is for a search of layouts, and --global-batch is not "
            "given",
            hint="add --global-batch and --cluster, or leave it out",
        )


def _refuse(**given: object) -> None:
    """Options that say nothing about a search of layouts."""
    for name, value in given.items():
        if value:
            option = name.replace("_", "-")
            raise InputError(
                f"--{option} and --global-batch cannot go together: layouts are compared by times "
                "computed for --cluster",
                hint=f"leave --{option} out; interlace simulate draws a layout",
            )
