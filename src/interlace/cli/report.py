"""`interlace report`: turn the records of a run into pages and pictures."""

from pathlib import Path

from interlace.cli.options import Verbose
from interlace.errors import InputError


def report(directory: Path, /, *, output: Path | None = None, verbose: Verbose = False) -> int:
    """Write the report of a finished run, and print the files it wrote.

    Parameters
    ----------
    directory
        Output folder of the run.
    output
        The HTML file to write; report.html in the folder when not given.
    verbose
        Show where an error came from.
    """
    if not directory.is_dir():
        raise InputError(
            f"there is no folder {directory}", hint="give the output.directory of a run"
        )
    from interlace.report.build import build_report  # noqa: PLC0415  imports matplotlib

    for path in build_report(directory, output):
        print(path)
    return 0
