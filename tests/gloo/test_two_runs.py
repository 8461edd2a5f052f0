"""Proves that two runs never write into one directory: the second is refused, an orphan ends."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from checkpoint_runs import Runs

from interlace.checkpoint.to_hugging_face import sound_manifest
from interlace.claims import LOCK, read_owner

LIVE: dict[str, Any] = {
    "train__steps": 100000, "output__record_every": 0, "checkpoint__every": 4,
    "checkpoint__resume": "latest", "output__overwrite": "true",
}  # fmt: skip


def wait_for(what: Callable[[], Any], running: Any) -> None:
    deadline = time.monotonic() + 100
    while not what():
        assert len(running.running()) == 2, running.report()
        assert time.monotonic() < deadline, running.report()
        time.sleep(0.01)


def test_a_second_run_is_refused_and_an_orphan_ends(tmp_path: Path) -> None:
    """While a run of two ranks is live: a second one in its directory, or with its checkpoints, is
    refused by name, and nothing is changed. When another host takes the directory over, the run
    ends, by name, before it writes or removes anything. The same command then goes on."""
    runs = Runs(tmp_path)
    lock, kept = runs.folder / "live" / LOCK, runs.checkpoints("live")
    with runs.started("live", 2, **LIVE) as running:
        wait_for(lambda: runs.steps("live"), running)
        owner = read_owner(lock.parent)
        assert owner is not None
        assert owner.pid == running.pid(0)
        (same,) = runs.train("live", checkpoint__every=0, output__overwrite="true")
        (beside,) = runs.train("beside", checkpoint__directory=kept, checkpoint__resume="latest")
        for refused, field in ((same, "output.directory"), (beside, "checkpoint.directory")):
            assert f"{field} = " in refused.value["error"]
            assert (
                f"is in use by {owner.command} (host {owner.host}, pid {owner.pid}, since"
                in (refused.value["error"])
            )
            assert f"set {field} to another folder" in refused.value["hint"]
        assert not (runs.folder / "beside" / "metrics.jsonl").exists()
        assert running.running() == [0, 1], running.report()

        taken = replace(owner, epoch=owner.epoch + 1, token="other", host="elsewhere")
        for folder in (lock.parent, kept):
            other = folder / "other"  # a run that reads half of it would end by another name
            other.write_text(json.dumps(asdict(taken)) + "\n")
            other.replace(folder / LOCK)
        before, lines = runs.steps("live"), (lock.parent / "metrics.jsonl").read_bytes()
        ended = running.wait()
        assert all(f"taken over by {taken}" in each.value["error"] for each in ended), ended
        assert runs.steps("live") == before
        assert (lock.parent / "metrics.jsonl").read_bytes().startswith(lines)
        assert runs.events("live", "end") == []

    again = {**LIVE, "train__steps": before[-1] + 1, "checkpoint__every": 1}
    runs.train("live", ranks=2, **again)
    manifest = sound_manifest(runs.checkpoint("live", before[-1] + 1))
    assert manifest.epoch == taken.epoch + 1
