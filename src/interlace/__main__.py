"""`python -m interlace`, and the `interlace` command."""

import os
import sys
from collections.abc import Sequence
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
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Threads of the transport and the store may still be in native code, from where the
        # interpreter's shutdown ends them by force, and that aborts the whole process (seen once
        # in some hundred runs: "terminate called without an active exception", SIGABRT).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
