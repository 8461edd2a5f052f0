"""`python -m interlace`, and the `interlace` command."""

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 ok, 1 failed while running, 2 bad input."""
    from interlace.cli.app import run  # noqa: PLC0415  importing this module does nothing

    return run(sys.argv[1:] if arguments is None else arguments)


def entry() -> NoReturn:
    """Run the command of this process and end the process. Modules in the working folder can be
    imported, as under `python -m`: a run may name a model or a search of the user's own."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        code = main()
    except SystemExit as ended:  # of a rank whose mistake the first rank tells
        code = ended.code if isinstance(ended.code, int) else 1
    if os.environ.get("WORLD_SIZE", "1") == "1":
        # What Python runs when it ends; temporary folders are removed there.
        atexit._run_exitfuncs()
    # The rest of the interpreter's shutdown is left out. It ends threads by force, which aborts the
    # whole process where those of a rank's transport and store are in native code (seen once in
    # some hundred runs: "terminate called without an active exception", SIGABRT). And it frees the
    # objects of a trace one by one, which took a second of `interlace plan llama-70b`.
    with suppress(OSError):  # of output that cannot be written, which has been said
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
