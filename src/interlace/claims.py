"""Who may write into a directory: one run at a time, held by the kernel and counted in a file.

    DIRECTORY/.interlace.lock    {"epoch": 3, "token": "5f0c...", "host": ..., "pid": ..., ...}

The run's first rank holds a lock (flock) on this file. The kernel lets go of it when the process
ends, in whatever way; the file stays, because a lock on a file that was removed protects nothing.
Where a lock is not seen on other hosts, the content tells: each claim writes a token of its own and
the next epoch, and a run looks for its token before each change.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from interlace.errors import InputError, RunError

LOCK = ".interlace.lock"
"""File in a claimed directory that its run holds locked."""
RESTART_WAIT_S = 10.0
"""For a run that goes on with its own directory: what is left of the attempt before ends by itself
within 5 s of its launcher or of a rank."""
WAIT_S = 1.0
"""For any run: a process that was killed a moment ago may not be gone yet."""

_RETRY_S = 0.05
"""Seconds between two tries to take a lock; a choice."""
_NO_LOCKS = {errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}
"""What the system says where a file system keeps no locks."""
_MOST_BYTES = 1 << 16
"""Bytes of a lock file that are read: more than a record of its owner needs."""
_STARTING = "a run that is just starting"
"""The owner, where its record is not written yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The run that claimed a directory last, as its lock file says."""

    epoch: int
    """Claims of this directory so far."""
    token: str
    host: str
    pid: int
    started: str
    command: str

    def __str__(self) -> str:
        return f"{self.command} (host {self.host}, pid {self.pid}, since {self.started})"


class ClaimLost(RunError):
    """This run may write into a directory no more."""


class Claim:
    """One run's right to write into `directory`, the value of the configuration's `field`.

    All ranks of a run have the same `token`. Use `take`, then `begin`; a rank whose first rank
    holds the directory needs neither.
    """

    def __init__(self, directory: Path, field: str, token: str, *, epoch: int = 0) -> None:
        self.directory = directory
        self.path = directory / LOCK
        self.field = field
        self.token = token
        self.epoch = epoch
        """0 until `begin`; a later claim of the same directory has a larger one."""
        self._descriptor: int | None = None

    def take(self, wait_s: float = WAIT_S) -> Self:
        """Lock the directory, which is made. Changes nothing that a run wrote.

        Raises InputError naming the owner if another process still holds it after `wait_s`.
        """
        deadline, told = time.monotonic() + wait_s, False
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            while self._descriptor is None:
                owner = read_owner(self.directory)
                if owner is not None and owner.token == self.token:
                    self.epoch = owner.epoch  # another rank of this run holds it
                    return self
                self._descriptor = _locked(self.path)
                if self._descriptor is None and time.monotonic() > deadline:
                    raise self._held(owner)
                if self._descriptor is None:
                    if not told and wait_s > WAIT_S:
                        print(f"{self._held(owner).message}; waiting {wait_s:g} s", file=sys.stderr)
                    told = True
                    time.sleep(_RETRY_S)
        except OSError as error:
            raise InputError(
                f"{self.field} = {str(self.directory)!r} cannot be used: {error.strerror or error}",
                hint=f"set {self.field} to a folder that can be written",
            ) from error
        return self

    def begin(self, newest_epoch: int = 0) -> None:
        """Count this run, above `newest_epoch` (of a checkpoint, say), as the owner from now on."""
        if self._descriptor is None:
            return
        earlier = read_owner(self.directory)
        self.epoch = max(newest_epoch, earlier.epoch if earlier else 0) + 1
        owner = Owner(
            epoch=self.epoch,
            token=self.token,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=os.environ.get("INTERLACE_COMMAND") or shlex.join(sys.argv),
        )
        # In place: a lock belongs to the file, not to its name.
        content = json.dumps(asdict(owner)).encode() + b"\n"
        os.pwrite(self._descriptor, content, 0)  # one line; what a longer one left is not read
        os.ftruncate(self._descriptor, len(content))
        os.fsync(self._descriptor)

    def check(self) -> None:
        """Raise ClaimLost unless this run is the last one to have claimed the directory.

        Call it before each change; it reads one small file.
        """
        owner = read_owner(self.directory)
        if owner is not None and owner.token == self.token:
            return
        if owner is None:
            raise ClaimLost(
                f"{self.path} is not there any more, or cannot be read, so this run does not know "
                f"whether {self.field} is still its own",
                hint="leave that file alone while a run is live; all hosts must share the folder",
            )
        raise ClaimLost(
            f"{self.field} = {str(self.directory)!r} was taken over by {owner}, as epoch "
            f"{owner.epoch}; this run has epoch {self.epoch or 'none'} and may not write there",
            hint=f"end this run, or start it again with another {self.field}",
        )

    def release(self) -> None:
        """Let another run claim the directory; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _held(self, owner: Owner | None) -> InputError:
        return InputError(
            f"{self.field} = {str(self.directory)!r} is in use by {owner or _STARTING}",
            hint=f"set {self.field} to another folder, or end that run first",
        )


@dataclass(frozen=True, slots=True)
class Claims:
    """What a run claimed; a context manager that lets go of it."""

    output: Claim
    checkpoints: Claim | None
    """None for a run that writes none."""
    resumes: bool = False
    """Whether the run goes on from its own checkpoints, so that the results in its output directory
    are its own; known to the first rank."""
    finished: int = 0
    """The step after which the run has ended already, with nothing left to do; else 0."""

    @property
    def separate(self) -> Claim | None:
        """That of checkpoints, unless they lie in the output directory itself."""
        return None if self.checkpoints is self.output else self.checkpoints

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let other runs claim the directories."""
        for claim in (self.output, self.checkpoints):
            if claim is not None:
                claim.release()


def claims_on(output: Path, checkpoints: Path | None, field: str, token: str) -> Claims:
    """The rights to write of a run; nothing is taken yet. `checkpoints` is None for a run that
    writes none, and `field` names the value of the configuration that it follows from."""
    own = Claim(output, "output.directory", token)
    if checkpoints is None:
        return Claims(own, None)
    if checkpoints.resolve() == output.resolve():
        return Claims(own, own)
    return Claims(own, Claim(checkpoints, field, token))


def new_token() -> str:
    """What the ranks of one run have in common, and nobody else."""
    return uuid.uuid4().hex


def read_owner(directory: Path) -> Owner | None:
    """Who claimed a directory last; None if nobody did, or the file is damaged."""
    try:
        with (directory / LOCK).open("rb") as file:
            data: Any = json.loads(file.readline(_MOST_BYTES))
    except (OSError, ValueError):
        return None
    known = Owner.__dataclass_fields__
    if not isinstance(data, dict) or data.keys() != known.keys():
        return None
    if any(type(data[name]) is not known[name].type for name in known):
        return None
    return Owner(**data)


def holder(directory: Path) -> str:
    """The run that is live in a directory, as far as its lock is seen from this host, or ""."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # nobody's, or not to be read
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return str(read_owner(directory) or _STARTING)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(descriptor)
    return ""


def refuse_in_live_run(path: Path) -> None:
    """Raise InputError if `path`, which is about to be replaced, may be a file of a run that is
    live in its folder."""
    if path.exists() and (owner := holder(path.parent)):
        raise InputError(
            f"{path} lies in the output directory of a live run: {owner}",
            hint="name another file, or wait until that run has ended",
        )


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock, or None while another process does."""
    # Not inherited by programs that this process starts: they must not keep the lock.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with contextlib.ExitStack() as failed:
        failed.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(
                f"warning: the file system of {path} has no locks ({error.strerror}): a second "
                "run in this folder is not refused, it takes the folder over",
                file=sys.stderr,
            )
        if not _is_at(descriptor, path):  # removed, and perhaps made anew, in the meantime
            return None
        failed.pop_all()
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
