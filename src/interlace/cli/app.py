"""The commands and their options. Each command's module is imported only when it runs.

What every command says, and how it ends: messages on stderr, data on stdout, exit codes.

0 ok, 1 failed while running, 2 bad input, 130 interrupted, 141 nobody reads the output.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cyclopts import App
from cyclopts.exceptions import CycloptsError, UnusedCliTokensError

from interlace import __version__
from interlace.cli.help_panels import PanelsByTable
from interlace.cli.options import in_words_of_run_files, read_run_file
from interlace.errors import InputError, InterlaceError, complain

INTERRUPTED = 130
"""Exit code after Ctrl-C, 128 + SIGINT, as shells give it."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a system call that mean that a disk, or a user's share of it, is full."""
BROKEN_PIPE = 141
"""Exit code if nobody reads the output, 128 + SIGPIPE, as shells give it."""


def report_errors(command: Callable[[], int], *, verbose: bool) -> int:
    """Run a command and return its exit code; turn what it raises into a short message."""
    try:
        code = command()
        sys.stdout.flush()
    except InterlaceError as error:
        if verbose or not error.told:
            complain(error.message, hint=error.hint, verbose=verbose)
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted", verbose=verbose)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        complain(*_unforeseen(error, verbose=verbose), verbose=verbose)
        return 1
    return code


def _unforeseen(error: Exception, *, verbose: bool) -> tuple[str, str]:
    """What is said of an error that no command raises itself: the message, and a hint."""
    if isinstance(error, OSError) and error.errno in _FULL:
        where = error.filename or "the output"
        return f"cannot write {where}: {error.strerror}", (
            "free space, or set output.directory and checkpoint.directory to another disk "
            "(XDG_CACHE_HOME for caches); with checkpoints, --checkpoint.resume latest goes on"
        )
    return (
        f"{type(error).__name__}: {error}",
        "" if verbose else "run it again with -v to see where",
    )


def build_app() -> App:
    """The command line as a cyclopts App; calling it returns the exit code."""
    app = App(
        name="interlace",
        help="Hide communication in distributed LLM training.",
        version=__version__,
        version_flags=["--version"],
        result_action="return_value",
        help_formatter=PanelsByTable(),
        suppress_keyboard_interrupt=False,
    )
    app.command(
        "interlace.cli.train:train",
        name="train",
        help="Train a model on local processes, or as one rank of a torchrun or SLURM job.",
        config=read_run_file,
    )
    app.command(
        "interlace.cli.plan_command:plan",
        name="plan",
        help="Find the order of operators for a run without training, and print it.",
        config=read_run_file,
    )
    app.command(
        "interlace.cli.simulate_command:simulate",
        name="simulate",
        help="Simulate a run on a cluster: step time, MFU, exposed communication, memory.",
        config=read_run_file,
    )
    app.command(
        "interlace.cli.profile:profile",
        name="profile",
        help="Measure operators, collectives and pairs of both, for plans.",
        config=read_run_file,
    )
    app.command(
        "interlace.cli.schedule:schedule",
        name="schedule",
        help="Compare schedules of a pipeline, or verify, draw and write one.",
    )
    app.command(
        "interlace.cli.explain:explain",
        name="explain",
        help="Say what a run or a trace spends on communication, and what could be hidden.",
    )
    app.command(
        "interlace.cli.export:export",
        name="export",
        help="Write the weights of a run for transformers.",
    )
    app.command(
        "interlace.cli.bench:bench", name="bench", help="Measure one claim; without a name, list."
    )
    lab = App(name="lab", help="Hosts with slow links, made of network namespaces.")
    lab.command("interlace.cli.lab:run", name="run", help="Run a command on every rank of a lab.")
    lab.command("interlace.cli.lab:clean", name="clean", help="Remove what killed labs left.")
    app.command(lab)
    app.command(
        "interlace.cli.report:report",
        name="report",
        help="Write the report of a finished run or a cost file.",
    )
    return app


def run(arguments: Sequence[str]) -> int:
    """Parse the arguments, run the command they name, and return the exit code."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    verbose = "-v" in ours or "--verbose" in ours
    return report_errors(lambda: _call(build_app(), arguments), verbose=verbose)


def _call(app: App, arguments: Sequence[str]) -> int:
    try:
        words = in_words_of_run_files(arguments)
        result: Any = app(words, exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as error:
        raise _input_error(error, arguments) from error
    return result or 0


def _input_error(error: CycloptsError, arguments: Sequence[str]) -> InputError:
    """cyclopts' message, split into what is wrong and what was probably meant."""
    message, suggests, suggestion = str(error).partition(" Did you mean ")
    command = " ".join(["interlace", *(error.command_chain or ())])
    hint = f"{command} --help lists what there is"
    if suggests:
        hint = f"did you mean {suggestion}"
    elif isinstance(error, UnusedCliTokensError):
        hint = "options that are on or off take no word: --name, --name=false"
    return InputError(message.strip(), hint=hint)
