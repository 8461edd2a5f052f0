"""Proves that a directory has one owner at a time, whatever becomes of processes and files."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from interlace import claims
from interlace.claims import (
    LOCK,
    Claim,
    ClaimLost,
    holder,
    new_token,
    read_owner,
    refuse_in_live_run,
)
from interlace.errors import InputError

OTHER = """
import sys, time
from pathlib import Path
from interlace.claims import Claim
claim = Claim(Path(sys.argv[1]), "output.directory", "theirs").take()
claim.begin()
print(claim.epoch, flush=True)
time.sleep(100)
"""


def mine(folder: Path) -> Claim:
    return Claim(folder, "output.directory", new_token())


@contextmanager
def other_process(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that has claimed `folder`, until it is killed."""
    command = [sys.executable, "-c", OTHER, str(folder)]
    environment = {**os.environ, "INTERLACE_COMMAND": "interlace train theirs.toml"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        try:
            yield process
        finally:
            process.kill()


def test_a_held_directory_is_refused_and_its_owner_named_until_it_is_killed(tmp_path: Path) -> None:
    """Nothing that the owner wrote changes; after SIGKILL the next claim is a newer epoch."""
    folder = tmp_path / "new" / "out"
    with other_process(folder) as process:
        before = (folder / LOCK).read_bytes()
        with pytest.raises(InputError) as refused:
            mine(folder).take(wait_s=0.1)
        (folder / "cost.json").write_text("theirs")
        with pytest.raises(InputError, match=r"cost.json lies in the output directory of a live"):
            refuse_in_live_run(folder / "cost.json")
        refuse_in_live_run(folder / "new.json")
        assert "interlace train theirs.toml (host " in refused.value.message
        assert f"pid {process.pid}, since 20" in refused.value.message
        assert "set output.directory" in refused.value.hint
        assert (folder / LOCK).read_bytes() == before
        assert f"pid {process.pid}" in holder(folder)
        process.send_signal(signal.SIGKILL)
        ours = mine(folder).take(wait_s=10)
    assert ours.epoch == 0, "the owner changes with begin, not before"
    ours.begin()
    ours.check()
    assert ours.epoch == 2
    ours.release()
    assert holder(folder) == ""
    refuse_in_live_run(folder / "cost.json")


def test_an_owner_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    first, second = mine(tmp_path).take(), mine(tmp_path)
    first.begin(newest_epoch=7)
    assert first.epoch == 8
    with pytest.raises(InputError, match="is in use by"):
        second.take(wait_s=0)
    first.release()
    first.release()
    second.take(wait_s=0).begin()
    assert second.epoch == 9
    second.release()


def test_ranks_of_one_run_share_a_claim(tmp_path: Path) -> None:
    """A rank whose fellow holds the directory takes it as its own, and cannot let go of it."""
    first = mine(tmp_path).take()
    first.begin()
    fellow = Claim(tmp_path, "output.directory", first.token).take(wait_s=0)
    fellow.begin()
    fellow.check()
    fellow.release()
    assert fellow.epoch == first.epoch == 1
    assert holder(tmp_path)
    first.release()


def test_an_orphan_of_an_older_epoch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the file system has no locks the newer run goes on, with a warning; the older may not
    write."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(claims.fcntl, "flock", no_locks)
    orphan, newer = mine(tmp_path).take(), mine(tmp_path)
    orphan.begin()
    newer.take()
    orphan.check()
    newer.begin()
    newer.check()
    with pytest.raises(ClaimLost) as lost:
        orphan.check()
    assert "was taken over by" in lost.value.message
    assert "as epoch 2; this run has epoch 1" in lost.value.message
    assert "has no locks (No locks available)" in capsys.readouterr().err
    assert holder(tmp_path) == ""
    orphan.release()
    newer.release()


@pytest.mark.parametrize(
    "left",
    ["", "{}", '{"epoch": 1', "[1]", '{"epoch": "3"}', "\0" * 99],
    ids=["empty", "nothing", "half", "list", "text", "zeros"],
)
def test_a_damaged_file_is_nobodys(tmp_path: Path, left: str) -> None:
    """The epoch of the newest checkpoint then counts."""
    (tmp_path / LOCK).write_text(left)
    assert read_owner(tmp_path) is None
    claim = mine(tmp_path).take(wait_s=0)
    claim.begin(newest_epoch=4)
    assert claim.epoch == 5
    claim.check()
    (tmp_path / LOCK).write_text(left)
    with pytest.raises(ClaimLost, match="does not know"):
        claim.check()
    claim.release()


def test_a_removed_file_ends_the_claim(tmp_path: Path) -> None:
    """Also when another run has made it anew: a lock on a file without a name protects nothing."""
    first, second = mine(tmp_path).take(), mine(tmp_path)
    first.begin()
    (tmp_path / LOCK).unlink()
    with pytest.raises(ClaimLost, match="is not there any more"):
        first.check()
    second.take(wait_s=0).begin()
    with pytest.raises(ClaimLost, match="was taken over by"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used: Not a directory"):
        mine(tmp_path / "file" / "out").take()


def test_the_content_names_the_process(tmp_path: Path) -> None:
    claim = mine(tmp_path).take()
    claim.begin()
    said = json.loads((tmp_path / LOCK).read_text())
    assert (said["pid"], said["epoch"], said["token"]) == (os.getpid(), 1, claim.token)
    claim.release()
