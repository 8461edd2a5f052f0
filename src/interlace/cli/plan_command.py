"""`interlace plan`: find the plan of a run without training."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from interlace.cli.options import RunFile, RunOptions, Verbose
from interlace.config import RunConfig


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
    config: RunOptions = RunConfig(),  # noqa: B008  frozen
    verbose: Verbose = False,
) -> int:
    """Find the order of operators for a run without training, and print it.

    Parameters
    ----------
    run
        A TOML run file, or the name of a preset (demo, quickstart, llama-70b, llama-70b-pipeline).
    output
        Write the plan to this file instead of standard output, for plan.file of a later run.
    cluster
        Compute times for this cluster: a TOML file, or a preset (a40, a800, h100, h200). It takes
        the place of hardware.* and link.*, and is refused together with them or with --cost.
    cost
        Times from this file, written by `interlace profile`, instead of computed ones.
    interpolate
        Estimate operators that the cost file does not have.
    json
        Also write the plan with all figures to this file.
    picture
        Also draw the plan's timeline to this .png file.
    verbose
        Show where an error came from.
    """
    from interlace.train.planning import plan_command  # noqa: PLC0415  imports torch

    return plan_command(
        config,
        output,
        cluster=cluster,
        cost=cost,
        interpolate=interpolate,
        json=json,
        picture=picture,
    )
