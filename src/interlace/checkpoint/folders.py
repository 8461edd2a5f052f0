"""Checkpoint folders: whole or not there at all, and checked before anything is read from them.

    checkpoints/step-00000120/manifest.json  rank-00000.safetensors  rank-00001.safetensors

A folder is written beside its place, every file is fsynced, and one rename makes it visible.
Names that begin with a dot are unfinished work of this module; `recover` clears them.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from interlace.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    SavedFile,
    digest_of,
    parse_manifest,
)
from interlace.errors import RunError

_STEP = re.compile(r"step-(\d{8})")
"""Finds the folder of a checkpoint, by its step."""
_UNFINISHED = re.compile(r"\.step-\d{8}(\.epoch-\d+)?\.(tmp|gone)")
"""Finds what a run that was killed while it wrote or removed a checkpoint has left."""
_REPLACED = re.compile(r"\.(step-\d{8})\.replaced")
"""Finds a checkpoint that one of the same step is replacing."""
# A thousand ranks with a thousand tensors each need about 0.2 GB.
MOST_MANIFEST_BYTES = 1 << 30


class Damaged(RunError):
    """A checkpoint that must not be loaded, and why."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(
            f"checkpoint {folder} is damaged: {reason}",
            hint='take another one, or set checkpoint.resume = "latest"',
        )
        self.reason = reason


def folder_name(step: int) -> str:
    """Name of the checkpoint after `step`."""
    return f"step-{step:08d}"


def saved_steps(directory: Path) -> list[int]:
    """Steps that have a folder in `directory`, newest first. Links are not followed."""
    if not directory.is_dir():
        return []
    found = [
        int(match[1])
        for entry in os.scandir(directory)
        if (match := _STEP.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
    ]
    return sorted(found, reverse=True)


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoints in a directory, as they were when it was read."""

    directory: Path
    steps: list[int]
    """Newest first."""
    newest: Manifest | None
    """The newest that can be read: what is damaged is told when it is taken up."""

    @property
    def epoch(self) -> int:
        """Of the run that wrote the newest one; 0 if there is none."""
        return self.newest.epoch if self.newest is not None else 0


def saved_in(directory: Path) -> Saved:
    """What a directory holds. No file of tensors is read."""
    steps = saved_steps(directory)
    for step in steps:
        with contextlib.suppress(Damaged):
            return Saved(directory, steps, read_manifest(directory / folder_name(step)))
    return Saved(directory, steps, None)


def temporary_path(directory: Path, step: int, epoch: int) -> Path:
    """Where the files of a new checkpoint are written.

    A rank of an earlier epoch that still runs cannot reach into it by its name.
    """
    return directory / f".{folder_name(step)}.epoch-{epoch}.tmp"


def temporary_folder(directory: Path, step: int, epoch: int) -> Path:
    """That folder, made if it is not there."""
    folder = temporary_path(directory, step, epoch)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def seal(path: Path) -> SavedFile:
    """Bring a written file to the disk, and take its size and checksum."""
    # safetensors makes files for their owner only; a checkpoint is as open as its folder.
    path.chmod(path.parent.stat().st_mode & 0o666)
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return SavedFile(
            name=path.name, size_bytes=os.fstat(file.fileno()).st_size, sha256=checksum
        )


def commit(folder: Path, manifest: Manifest, check: Callable[[], None]) -> Path:
    """Turn a temporary folder with all its files into the checkpoint; returns its new path.

    `check` raises if this run may not write there any more; it is called last of all.
    OSError if it cannot be; then there is no such checkpoint, and earlier ones are untouched.
    """
    body = asdict(manifest)
    content = {"format": FORMAT, "sha256": digest_of(body), "body": body}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(content, file, allow_nan=False, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    final = folder.parent / folder_name(manifest.step)
    replaced = folder.parent / f".{final.name}.replaced"
    check()
    if final.exists():
        final.rename(replaced)
    folder.rename(final)
    _sync_folder(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


def discard(folder: Path) -> None:
    """Remove a checkpoint: a kill half-way never leaves half of one under its name."""
    gone = folder.with_name(f".{folder.name}.gone")
    folder.rename(gone)
    shutil.rmtree(gone)


def drop_oldest(directory: Path, keep: int, check: Callable[[], None]) -> list[int]:
    """Discard all but the newest `keep` checkpoints (0 keeps all); returns the steps that went.

    `check` raises if this run may not remove them; it is called before each.
    """
    dropped = saved_steps(directory)[keep:] if keep else []
    for step in dropped:
        check()
        discard(directory / folder_name(step))
    return dropped


def set_aside(folder: Path) -> Path:
    """Give a damaged checkpoint a name under which nothing finds it any more."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    folder.rename(aside)
    _sync_folder(folder.parent)
    return aside


def recover(directory: Path) -> list[str]:
    """Clear what killed processes left; a replacement that was cut off is undone. Says what."""
    if not directory.is_dir():
        return []
    done = []
    for entry in sorted(directory.iterdir()):
        replaced = _REPLACED.fullmatch(entry.name)
        if replaced and not (directory / replaced[1]).exists():
            entry.rename(directory / replaced[1])
            done.append(f"{replaced[1]} put back")
        elif replaced or _UNFINISHED.fullmatch(entry.name):
            shutil.rmtree(entry)
            done.append(f"{entry.name} removed")
    return done


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked in itself. Raises Damaged."""
    path = folder / MANIFEST
    _regular_bytes(folder, MANIFEST, at_most=MOST_MANIFEST_BYTES)
    try:
        data: Any = json.loads(path.read_bytes())
        manifest = parse_manifest(data)
    except OSError as error:
        raise Damaged(folder, f"{MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise Damaged(folder, f"{MANIFEST}: {error}") from error
    named = _STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise Damaged(folder, f"it holds the state after step {manifest.step}")
    return manifest


def view_of(folder: Path) -> list[int]:
    """Numbers that are equal for all who see the same folder, and differ for a copy of it."""
    try:
        facts = (folder / MANIFEST).stat()
    except OSError:
        return []
    return [facts.st_ino, facts.st_size, facts.st_mtime_ns]


def check_file(folder: Path, file: SavedFile) -> None:
    """Size and checksum of one file. Raises Damaged."""
    size = _regular_bytes(folder, file.name)
    if size != file.size_bytes:
        raise Damaged(folder, f"{file.name} has {size} bytes, and had {file.size_bytes}")
    try:
        with (folder / file.name).open("rb") as opened:
            checksum = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise Damaged(folder, f"{file.name} cannot be read: {error.strerror}") from error
    if checksum != file.sha256:
        raise Damaged(folder, f"the content of {file.name} has changed since it was written")


def _regular_bytes(folder: Path, name: str, at_most: int | None = None) -> int:
    """Size of a file that is no link, pipe or folder."""
    try:
        facts = (folder / name).lstat()
    except OSError as error:
        raise Damaged(folder, f"{name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(facts.st_mode):
        raise Damaged(folder, f"{name} is not a regular file")
    if at_most is not None and facts.st_size > at_most:
        raise Damaged(folder, f"{name} has {facts.st_size} bytes, more than {at_most}")
    return facts.st_size


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
