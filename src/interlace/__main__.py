"""`python -m interlace`, and the `interlace` command."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 ok, 1 failed while running, 2 bad input."""
    from interlace.cli.app import run  # noqa: PLC0415  importing this module does nothing

    return run(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
