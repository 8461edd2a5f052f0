"""`interlace train`: become one rank of the job around us, or start the ranks on this machine."""

from typing import Annotated

from cyclopts import Parameter

from interlace.cli.options import RunFile, RunOptions, Verbose
from interlace.cli.ranks import is_rank, start_ranks
from interlace.config import RunConfig


def train(
    run: RunFile,
    /,
    *,
    nproc: Annotated[int | None, Parameter(show_default=False)] = None,
    config: RunOptions = RunConfig(),  # noqa: B008  frozen
    verbose: Verbose = False,
) -> int:
    """Train a model on local processes, or as one rank of a torchrun or SLURM job.

    Parameters
    ----------
    run
        A TOML run file, or the name of a preset (demo, quickstart).
    nproc
        Processes to start on this machine; as many as the layout needs when not given.
    verbose
        Show where an error came from.
    """
    if not is_rank(config, nproc):
        start_ranks(["train"], config, nproc, verbose=verbose)
        return 0
    from interlace.train.worker import main  # noqa: PLC0415  imports torch: cores come first

    return main(config)
