"""What `interlace plan` says and writes: words on standard error, the plan, other files."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from interlace.claims import refuse_in_live_run
from interlace.errors import InputError
from interlace.run_files import write_whole


def check_outputs(outputs: Mapping[str, Path | None], cost: Path | None) -> None:
    """Refuse names that cannot be written before a minute of work instead of after it."""
    taken = {cost.resolve(): "--cost"} if cost else {}
    for option, path in outputs.items():
        if path is None:
            continue
        whole = path.resolve()
        if whole.exists() and not whole.is_file():
            what = "a folder" if whole.is_dir() else "not a regular file"
            raise InputError(f"{option} {path} is {what}", hint="give the name of a file")
        if whole in taken:
            raise InputError(
                f"{taken[whole]} and {option} are both {path}", hint="give each a name of its own"
            )
        taken[whole] = option
        refuse_in_live_run(whole)
        above = next(parent for parent in whole.parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise InputError(
                f"{option} {path}: cannot write below {above}", hint="name another file"
            )
    picture = outputs["--picture"]
    if picture is not None and picture.suffix != ".png":
        raise InputError(f"--picture {picture} is not a .png file", hint="end its name in .png")


def give(text: str, output: Path | None) -> None:
    """Write a plan to a file or to standard output; to a terminal it would hide the tables."""
    if output is not None:
        write(output, text.encode())
    elif sys.stdout.isatty():
        lines = text.count("\n")
        say(f"the plan has {lines:,} lines: -o FILE writes them, and | less shows them")
    else:
        sys.stdout.write(text)


def write(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, and say so."""
    write_whole(path, content)
    say(f"wrote {path}")


def say(text: str) -> None:
    """A line or more on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def timed(words: str) -> Iterator[None]:
    """`words ... 3.2 s` on standard error."""
    start = time.perf_counter()
    print(f"{words} ... ", end="", file=sys.stderr, flush=True)
    try:
        yield
    except BaseException:
        say("")
        raise
    say(f"{time.perf_counter() - start:.1f} s")
