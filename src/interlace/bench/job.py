"""Run one training job of two ranks on a slow link: a real shaped one where that is possible."""

import subprocess
import sys
from pathlib import Path

from interlace.errors import RunError
from interlace.lab import hosts


def train_on_link(run_file: str | Path, rate: str, overrides: list[str]) -> str:
    """`interlace train RUN_FILE OVERRIDES` on a link of `rate`; returns how the link was made.

    Two network namespaces joined by a shaped link if this process may make them; otherwise two
    local processes on an emulated link, which is said on stderr and in every result. Empty
    `rate` leaves the link as fast as it is. Raises RunError when the job fails.
    """
    command = ["train", str(run_file), *overrides]
    reason = "this is already a lab" if hosts.inside_lab() else hosts.available()
    if not reason:
        code = hosts.run_in_lab(["interlace", *command], hosts=2, ranks_per_host=1, rate=rate)
        link = f"lab link {rate}" if rate else "lab link, not shaped"
    else:
        print(f"note: no network namespaces here ({reason}); the link is emulated", file=sys.stderr)
        extra = ["--link.rate", rate] if rate else []
        argv = [sys.executable, "-m", "interlace", *command, *extra]
        code = subprocess.run(argv, check=False).returncode
        link = f"emulated link {rate}" if rate else "real link of this machine"
    if code:
        raise RunError(
            f"the training job on a link of {rate or 'full'} rate ended with exit code {code}",
            hint="its own message is above",
        )
    return link
