"""Commands that run as ranks: become one of the job around us, or start them on this machine."""

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from interlace.cli.before_start import check_host_memory, check_named_files
from interlace.cli.run_file import save_run_config
from interlace.config import RunConfig
from interlace.degrees import ranks_of, resolve_layout
from interlace.errors import InputError
from interlace.ranks.launched import adopt_job, follow_launcher

MOST_RANKS = 16
"""So many local processes are started without being asked for by number."""


def become_rank(
    words: Sequence[str], config: RunConfig, nproc: int | None, *, verbose: bool
) -> bool:
    """Whether this process is a rank of a job (torchrun, SLURM, or this function started it);
    if so it takes the cores that its launcher chose.

    If not, `interlace WORDS[0] RUN WORDS[1:]` has run on each of `nproc` ranks here until all have
    ended; RUN is a file with all of `config`, and without `nproc` as many ranks start as the layout
    needs. Raises InputError if the job has another size than `config` needs, or if `--nproc` was
    given inside a job, and as `launch` does.
    """
    world_size = adopt_job(os.environ)
    ranks = _ranks_here(config, nproc) if world_size is None else world_size
    if world_size is not None and nproc is not None:
        raise InputError(
            f"--nproc {nproc} was given, but this process is already one rank of {world_size} "
            "(RANK and WORLD_SIZE are set)",
            hint="drop --nproc, or unset RANK and WORLD_SIZE to start local processes",
        )
    config = resolve_layout(config, ranks)
    if world_size is not None:
        follow_launcher(os.environ)
        return True
    if nproc is None and ranks > MOST_RANKS:
        raise InputError(
            f"the layout needs {ranks} ranks, more than a machine usually holds",
            hint="start it with torchrun or srun on all hosts, plan it with interlace plan, or say "
            f"--nproc {ranks} to start all of them here",
        )
    check_named_files(config)
    if words[0] == "train":
        check_host_memory(config, ranks)
    _start(words, config, ranks, verbose=verbose)
    return False


def _ranks_here(config: RunConfig, nproc: int | None) -> int:
    ranks = ranks_of(config) if nproc is None else nproc
    if ranks < 1:
        raise InputError(f"--nproc {ranks} must be positive", hint="set --nproc to 1 or more")
    return ranks


def _start(words: Sequence[str], config: RunConfig, ranks: int, *, verbose: bool) -> None:
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
