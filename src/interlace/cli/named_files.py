"""Whether the files that a run file names are there, before any of its ranks starts.

The ranks read them, and would say the same some seconds later, each behind its own start.
"""

import glob
from pathlib import Path

from interlace.config import RunConfig
from interlace.errors import InputError


def check_named_files(config: RunConfig) -> None:
    """Raise InputError naming the first file or folder of the run file that does not exist."""
    data, model, plan = config.data, config.model, config.plan
    named = {
        "data.path": ("" if data.path == "stdlib" else data.path, "a file, a folder or a glob"),
        "data.tokenizer": ("" if data.tokenizer == "bytes" else data.tokenizer, "tokenizer.json"),
        "model.config": (model.config, "a folder with a config.json"),
        "plan.file": (plan.file, "a plan that `interlace plan RUN -o FILE` wrote"),
    }
    for key, (path, what) in named.items():
        if path and not _exists(path, pattern=key == "data.path"):
            raise InputError(
                f"{key} = {path!r} does not exist (in {Path.cwd()})",
                hint=f"set {key} to {what}, or leave it out",
            )


def _exists(path: str, *, pattern: bool) -> bool:
    whole = Path(path).expanduser()
    if whole.exists():
        return True
    return pattern and next(glob.iglob(str(whole), recursive=True), None) is not None
