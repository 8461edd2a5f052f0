"""`interlace train`: become one rank of the job around us, or start the ranks on this machine."""

from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from interlace.cli.options import RunFile, RunOptions, Verbose
from interlace.cli.ranks import become_rank
from interlace.config import RunConfig
from interlace.rules import check as check_rules


def train(
    run: RunFile,
    /,
    *,
    nproc: Annotated[int | None, Parameter(show_default=False)] = None,
    check: Annotated[bool, Parameter(negative="")] = False,
    config: RunOptions = RunConfig(),  # noqa: B008  frozen
    verbose: Verbose = False,
) -> int:
    """Train a model on local processes, or as one rank of a torchrun or SLURM job.

    Parameters
    ----------
    run
        A TOML run file, or the name of a preset.
    nproc
        Processes to start on this machine; as many as the layout needs when not given.
    check
        First hold one step against eager PyTorch: losses, every gradient by name, times. What is
        wrong ends the run before training.
    verbose
        Show where an error came from.
    """
    if check:
        config = replace(config, compare=replace(config.compare, check=True))
        check_rules(config)
    if not become_rank(["train"], config, nproc, verbose=verbose):
        return 0
    from interlace.train.worker import main  # noqa: PLC0415  imports torch: cores come first

    return main(config)
