"""`make demo`: train, compare, draw. Everything it does is an `interlace` command."""

import json
import sys
from pathlib import Path

from interlace.bench.strands import train_on_link
from interlace.cli.run_file import load_run_config
from interlace.errors import InterlaceError
from interlace.report.build import build_report
from interlace.report.tables import comparison_lines

RATE = "750mbit"


def main() -> int:
    directory = Path(load_run_config("demo").output.directory)
    try:
        train_on_link("demo", RATE, sys.argv[1:])
        written = build_report(directory)
    except InterlaceError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    comparison = json.loads((directory / "comparison.json").read_text(encoding="utf-8"))
    print()
    for line in comparison_lines(comparison):
        print(line)
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
