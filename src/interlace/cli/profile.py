"""`interlace profile`: measure what a plan is made from."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from interlace.claims import refuse_in_live_run
from interlace.cli.options import RunFile, RunOptions, Verbose
from interlace.cli.ranks import become_rank
from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.ir import store
from interlace.ir.costs import CostTable
from interlace.run_files import COSTS

if TYPE_CHECKING:
    from interlace.train.profiling import ProfileProgress


def profile(
    run: RunFile,
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path(COSTS),
    again: Annotated[bool, Parameter(negative="")] = False,
    nproc: Annotated[int | None, Parameter(show_default=False)] = None,
    config: RunOptions = RunConfig(),  # noqa: B008  frozen
    verbose: Verbose = False,
) -> int:
    """Measure a run's operators, collectives and pairs of both on this machine.

    Parameters
    ----------
    run
        A TOML run file, or the name of a preset.
    output
        The cost file to write. If it is interrupted, the same command continues.
    again
        Measure everything again.
    nproc
        Processes to start on this machine; as many as the layout needs when not given.
    verbose
        Show where an error came from.
    """
    _check_output(output)
    words = ["profile", "--output", str(output.absolute()), *(["--again"] if again else [])]
    if not become_rank(words, config, nproc, verbose=verbose):
        return 0
    from interlace.train.profiling import profile_command  # noqa: PLC0415  imports torch

    with _progress(show=os.environ["RANK"] == "0") as progress:
        return profile_command(config, output, again=again, progress=progress)


def _check_output(output: Path) -> None:
    """Refuse what could not be written, or should not be replaced, before anything is measured."""
    if output.is_dir():
        raise InputError(f"{output} is a folder", hint=f"name a file: {output / COSTS}")
    refuse_in_live_run(output)
    if output.exists():
        store.load(output, CostTable)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write to {output.parent}: {error.strerror}", hint="name another --output"
        ) from error


@contextmanager
def _progress(*, show: bool) -> Iterator["ProfileProgress"]:
    """A bar on a terminal, lines in a file; both on standard error. The bar begins with the first
    measurement: before that the start has one of its own."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    console = Console(stderr=True)
    if not show:
        yield lambda name, done, total: None
    elif not console.is_terminal:
        yield lambda name, done, total: print(f"{done}/{total} {name}", file=sys.stderr)
    else:
        bar = Bar(console=console, transient=True)
        task = bar.add_task("measuring", total=None)

        def update(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)
            if done < total:
                bar.start()
            else:
                bar.stop()

        try:
            yield update
        finally:
            bar.stop()
