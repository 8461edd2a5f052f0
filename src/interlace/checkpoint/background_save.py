"""The part of a save that runs beside training: files, agreement of all ranks, and the rename."""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from interlace.checkpoint import folders as files
from interlace.checkpoint.manifest import Manifest, SavedFile
from interlace.checkpoint.tensor_files import file_name
from interlace.claims import Claim, ClaimLost
from interlace.ranks.small_collectives import gather_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the writing of one checkpoint ended; equal on all ranks but for the time."""

    step: int
    size_bytes: int
    write_ms: float
    error: str
    """Empty if the checkpoint is there."""
    warning: str
    """What else went wrong."""
    dropped: tuple[int, ...]
    """Steps whose checkpoints were removed."""

    def __str__(self) -> str:
        if self.error:
            return f"checkpoint of step {self.step} NOT written: {self.error}"
        mib, seconds = self.size_bytes / 2**20, self.write_ms / 1e3
        said = f"checkpoint of step {self.step}: {mib:,.1f} MiB in {seconds:.2f} s"
        return f"{said}; {self.warning}" if self.warning else said


class Background:
    """Runs `work` in a thread that does not keep the process alive."""

    def __init__(self, work: Callable[[], Outcome]) -> None:
        self._work = work
        self._outcome: Outcome | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="interlace-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the thread has ended, at the latest after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def outcome(self) -> Outcome:
        """What `work` returned or raised, once it has."""
        self._thread.join()
        assert self._outcome is not None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _run(self) -> None:
        try:
            self._outcome = self._work()
        except BaseException as error:
            self._outcome = error
        del self._work  # and with it the staged tensors


def write_checkpoint(
    manifest: Manifest,
    staged: dict[str, Tensor],
    claim: Claim,
    keep: int,
    group: dist.ProcessGroup | None,
) -> Outcome:
    """Write this rank's pieces and, when all ranks have, make the checkpoint visible.

    Collective on `group`, which nothing else may use meanwhile. A failure of any rank is in the
    outcome of all; then there is no such checkpoint, and earlier ones are as they were.
    """
    began = time.monotonic_ns()
    rank = dist.get_rank(group)
    own, error = _write_own(manifest, staged, claim, rank)
    everyone = gather_json([asdict(own) if own else None, error], group)
    written = tuple(SavedFile(**file) for file, _ in everyone if file)
    errors = [f"rank {number}: {text}" for number, (_, text) in enumerate(everyone) if text]
    said: Any = None
    if rank == 0:
        said = _commit(replace(manifest, files=written), errors, claim, keep)
    error, warning, dropped = gather_json(said, group)[0]
    return Outcome(
        step=manifest.step,
        size_bytes=sum(file.size_bytes for file in written),
        write_ms=(time.monotonic_ns() - began) / 1e6,
        error=error,
        warning=warning,
        dropped=tuple(dropped),
    )


def _write_own(
    manifest: Manifest, staged: dict[str, Tensor], claim: Claim, rank: int
) -> tuple[SavedFile | None, str]:
    """This rank's file, or why there is none."""
    from safetensors.torch import save_file  # noqa: PLC0415  only runs with checkpoints have it

    try:
        claim.check()
        folder = files.temporary_folder(claim.directory, manifest.step, manifest.epoch)
        if not staged:
            return None, ""
        path = folder / file_name(rank)
        save_file(staged, path)
        return files.seal(path), ""
    except Exception as error:
        return None, _reason(error)


def _commit(
    manifest: Manifest, errors: list[str], claim: Claim, keep: int
) -> tuple[str, str, list[int]]:
    """(error, warning, dropped steps); on the first rank only."""
    folder = files.temporary_path(claim.directory, manifest.step, manifest.epoch)
    try:
        if errors:
            raise OSError(errors[0])
        _check_seen(folder, manifest.files)
        files.commit(folder, manifest, claim.check)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)  # makes room on a full disk
        return _reason(error), "", []
    try:
        return "", "", files.drop_oldest(claim.directory, keep, claim.check)
    except (OSError, ClaimLost) as error:
        return "", f"older ones could not be removed: {_reason(error)}", []


def _check_seen(folder: Path, written: tuple[SavedFile, ...]) -> None:
    for file in written:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.size_bytes:
            raise OSError(
                f"the first rank does not see {path}: checkpoint.directory must be a folder that "
                "all hosts share"
            )


def _reason(error: Exception) -> str:
    """The system's words where there are any, and of which file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__
