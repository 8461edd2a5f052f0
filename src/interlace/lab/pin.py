"""Runs one rank of a lab on one core: `python -m interlace.lab.pin CORES FOLDER PROGRAM ARG...`

torchrun starts this once per rank. CORES (comma separated) are the host's, by LOCAL_RANK. FOLDER
is the lab's: `FOLDER/stderr` is a pipe that takes the standard error of all ranks, and a rank that
ends leaves its exit code in `FOLDER/exit-RANK` (torchrun keeps it to itself). Only rank 0 has a
standard output.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that are handed on to the program."""


def main(cores: str, folder: Path, program: list[str]) -> int:
    """Run `program` to its end; returns its exit code, 128 + number for a signal."""
    own = [int(core) for core in cores.split(",")]
    os.sched_setaffinity(0, {own[int(os.environ["LOCAL_RANK"]) % len(own)]})
    rank = os.environ["RANK"]
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        if child:
            child.send_signal(number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)
    with open(folder / "stderr", "wb") as stderr:
        out = None if rank == "0" else subprocess.DEVNULL
        child = subprocess.Popen(program, stdout=out, stderr=stderr)
    for number in received:  # before there was a child
        child.send_signal(number)
    code = child.wait()
    part = folder / f".exit-{rank}"
    part.write_text(str(code))
    part.rename(folder / f"exit-{rank}")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
