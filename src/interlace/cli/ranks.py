"""Commands that run as ranks: become one of the job around us, or start them on this machine."""

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from interlace.cli.host_memory import check_host_memory
from interlace.cli.named_files import check_named_files
from interlace.cli.run_file import save_run_config
from interlace.config import RunConfig
from interlace.degrees import ranks_of, resolve_layout
from interlace.errors import InputError
from interlace.ranks.launched import adopt_job, follow_launcher

MOST_RANKS = 16
"""So many local processes are started without being asked for by number."""


def is_rank(config: RunConfig, nproc: int | None) -> bool:
    """Whether this process is a rank of a job (torchrun, SLURM, `start_ranks`).

    If so it takes the cores that its launcher chose. Raises InputError if the job has another
    size than `config` needs, or if `--nproc` was given inside a job.
    """
    world_size = adopt_job(os.environ)
    if world_size is None:
        return False
    if nproc is not None:
        raise InputError(
            f"--nproc {nproc} was given, but this process is already one rank of {world_size} "
            "(RANK and WORLD_SIZE are set)",
            hint="drop --nproc, or unset RANK and WORLD_SIZE to start local processes",
        )
    resolve_layout(config, world_size)
    follow_launcher(os.environ)
    return True


def start_ranks(
    words: Sequence[str], config: RunConfig, nproc: int | None, *, verbose: bool
) -> None:
    """Run `interlace WORDS[0] RUN WORDS[1:]` on each of `nproc` ranks here, until all have ended.

    RUN is a file with all of `config`; without `nproc` as many ranks start as the layout needs.
    Raises as `launch` does.
    """
    ranks = ranks_of(config) if nproc is None else nproc
    if ranks < 1:
        raise InputError(f"--nproc {ranks} must be positive", hint="set --nproc to 1 or more")
    config = resolve_layout(config, ranks)
    if nproc is None and ranks > MOST_RANKS:
        raise InputError(
            f"the layout needs {ranks} ranks, more than a machine usually holds",
            hint="start it with torchrun or srun on all hosts, plan it with interlace plan, or say "
            f"--nproc {ranks} to start all of them here",
        )
    check_named_files(config)
    if words[0] == "train":
        check_host_memory(config, ranks)
    from interlace.ranks.launch import launch  # noqa: PLC0415  imports torch

    os.environ.setdefault("INTERLACE_COMMAND", shlex.join(["interlace", *sys.argv[1:]]))
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:
        resolved = Path(folder) / "run.toml"
        save_run_config(config, resolved)
        name, *rest = words
        # -P: a folder of the user's that is called z3 or tokenizers is no package.
        command = [sys.executable, "-P", "-u", "-m", "interlace", name, str(resolved), *rest]
        launch(
            [*command, "-v"] if verbose else command,
            ranks=ranks,
            cores_per_rank=config.train.threads,
            verbose=verbose,
            watchdog=config.watchdog,
            must_join=True,
        )
