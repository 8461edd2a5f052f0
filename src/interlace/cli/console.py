"""What every command says and how it ends: messages on stderr, data on stdout, exit codes.

0 ok, 1 failed while running, 2 bad input, 130 interrupted, 141 nobody reads the output.
"""

import os
import sys
import traceback
from collections.abc import Callable

from interlace.errors import InterlaceError

INTERRUPTED = 130
"""Exit code after Ctrl-C, 128 + SIGINT, as shells give it."""
BROKEN_PIPE = 141
"""Exit code if nobody reads the output, 128 + SIGPIPE, as shells give it."""


def report_errors(command: Callable[[], int], *, verbose: bool) -> int:
    """Run a command and return its exit code; turn what it raises into a short message."""
    try:
        code = command()
        sys.stdout.flush()
    except InterlaceError as error:
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
        hint = "" if verbose else "run it again with -v to see where"
        complain(f"{type(error).__name__}: {error}", hint=hint, verbose=verbose)
        return 1
    return code


def complain(message: str, *, hint: str = "", verbose: bool = False) -> None:
    """Print `error:` and `hint:` lines, naming this rank; with `verbose` the traceback first.

    One write, so that the messages of several ranks do not mix.
    """
    rank = os.environ.get("RANK", "")
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    text = f"error: {message}\n" if alone else f"error: rank {rank}: {message}\n"
    if hint:
        text += f"hint: {hint}\n"
    if verbose:
        text = traceback.format_exc() + text
    sys.stderr.write(text)
    sys.stderr.flush()
