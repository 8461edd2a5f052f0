"""Writing a file of the report so that it appears whole or not at all."""

from pathlib import Path

from interlace.errors import RunError
from interlace.ir import store


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path`, making its folder. Raises RunError when the disk refuses."""
    try:
        store.write_whole(path, content)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}",
            hint="free some space, or name another file with --output",
        ) from error
