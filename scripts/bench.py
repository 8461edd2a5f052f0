"""`make bench`: every bench that README and docs/results.md name, one after the other.

Each writes the file of bench/results/ that they name. Without network namespaces, which need
Linux and root, a bench would emulate its links; those figures are not theirs, so it is named
as skipped. It exits 1 if one failed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "bench/results/cpu"


class Bench(NamedTuple):
    """A bench of `interlace bench`, and how long it is said to take."""

    name: str
    minutes: int | None
    links: bool
    """Whether it measures on real links between namespaces."""

    @property
    def words(self) -> list[str]:
        return ["bench", self.name, "--json", f"{RESULTS}/{self.name}.json"]


BENCHES = (
    Bench("checks", None, links=False),
    Bench("strands", 24, links=True),
    Bench("zero3", 14, links=True),
    Bench("decompose", 44, links=True),
    Bench("reshard", 16, links=True),
    Bench("pipeline", 16, links=True),
    Bench("searched", 25, links=False),
    Bench("simulator", None, links=False),
    Bench("tensor_share", 15, links=True),
    Bench("stage_transfers", 62, links=True),
    Bench("moe_strands", 40, links=True),
)


def main() -> int:
    for bench in BENCHES:
        about = f"about {bench.minutes} minutes" if bench.minutes else "no stated duration"
        print(f"{bench.name:10} {about}{', on real links (root)' if bench.links else ''}")
    rows, failed = [], False
    for bench in BENCHES:
        if bench.links and not can_make_links():
            rows.append(f"{bench.name:10} skipped: real links need Linux and root")
            continue
        print(f"interlace {' '.join(bench.words)}", flush=True)
        start = time.monotonic()
        command = [sys.executable, "-m", "interlace", *bench.words]
        ended = subprocess.run(command, cwd=ROOT, check=False).returncode
        failed |= ended != 0
        how = "done" if ended == 0 else f"FAILED with exit code {ended}"
        rows.append(f"{bench.name:10} {how} in {(time.monotonic() - start) / 60:.1f} minutes")
    print("\n".join(["", *rows]))
    return int(failed)


def can_make_links() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


if __name__ == "__main__":
    sys.exit(main())
