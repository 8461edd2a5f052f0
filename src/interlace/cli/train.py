"""`interlace train`: become one rank of the job around us, or start the ranks on this machine."""

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from interlace.cli.options import RunFile, RunOptions, Verbose
from interlace.cli.run_file import save_run_config
from interlace.config import RunConfig, check_world
from interlace.errors import InputError
from interlace.runtime.launched import adopt_job, follow_launcher


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
        Processes to start on this machine; parallel.tensor when not given.
    verbose
        Show where an error came from.
    """
    world_size = adopt_job(os.environ)
    if world_size is None:
        return _start_ranks(config, nproc, verbose=verbose)
    if nproc is not None:
        raise InputError(
            f"--nproc {nproc} was given, but this process is already one rank of {world_size} "
            "(RANK and WORLD_SIZE are set)",
            hint="drop --nproc, or unset RANK and WORLD_SIZE to start local processes",
        )
    check_world(config, world_size)
    follow_launcher(os.environ)
    from interlace.train.worker import main  # noqa: PLC0415  imports torch: cores come first

    return main(config)


def _start_ranks(config: RunConfig, nproc: int | None, *, verbose: bool) -> int:
    ranks = config.parallel.tensor if nproc is None else nproc
    if ranks < 1:
        raise InputError(f"--nproc {ranks} must be positive", hint="set --nproc to 1 or more")
    check_world(config, ranks)
    from interlace.runtime.launch import launch  # noqa: PLC0415  imports torch

    os.environ.setdefault("INTERLACE_COMMAND", shlex.join(["interlace", *sys.argv[1:]]))
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:
        resolved = Path(folder) / "run.toml"
        save_run_config(config, resolved)
        command = [sys.executable, "-u", "-m", "interlace", "train", str(resolved)]
        launch(
            [*command, "-v"] if verbose else command,
            ranks=ranks,
            cores_per_rank=config.train.threads,
            verbose=verbose,
        )
    return 0
