"""`interlace plan`: find the plan of a run without training."""

from pathlib import Path

from interlace.cli.options import RunFile, RunOptions, Verbose
from interlace.config import RunConfig


def plan(
    run: RunFile,
    /,
    *,
    output: Path | None = None,
    config: RunOptions = RunConfig(),  # noqa: B008  frozen
    verbose: Verbose = False,
) -> int:
    """Find the order of operators for a run without training, and print it.

    Parameters
    ----------
    run
        A TOML run file, or the name of a preset (demo, quickstart).
    output
        Also write the plan to this file, for plan.file of a later run.
    verbose
        Show where an error came from.
    """
    from interlace.train.planning import plan_command  # noqa: PLC0415  imports torch

    return plan_command(config, output)
