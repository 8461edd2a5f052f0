"""`interlace report`: turn the records of a run into pages and pictures."""

from pathlib import Path

from interlace.cli.options import Verbose
from interlace.errors import InputError


def report(source: Path, /, *, output: Path | None = None, verbose: Verbose = False) -> int:
    """Write the report of a finished run or of a cost file, and print the files it wrote.

    Parameters
    ----------
    source
        Output folder of the run, or a cost file of `interlace profile`.
    output
        The HTML file to write; by default report.html in the folder, or COST.html.
    verbose
        Show where an error came from.
    """
    if not source.exists():
        raise InputError(
            f"there is no folder or file {source}",
            hint="give the output.directory of a run, or a cost file",
        )
    from interlace.report.build import build_report  # noqa: PLC0415  imports matplotlib

    for path in build_report(source, output):
        print(path)
    return 0
