"""Training runs that write checkpoints, as children of a test: whole, killed, resumed."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from processes import RankResult, run_ranks, start_ranks
from training import Workplace

from interlace.checkpoint.tensor_files import CheckpointReader, whole_tensor
from interlace.checkpoint.to_hugging_face import sound_manifest
from interlace.cli.run_file import load_run_config
from interlace.config import RunConfig
from interlace.errors import InterlaceError
from interlace.run_files import read_metrics

STEPS = 16
EVERY = 2
LIMIT_S = 120
SETTINGS = {
    "strands": "1",
    "watchdog.dead_after_s": "30",  # a busy machine is not a dead one
    "train.steps": str(STEPS),
    "checkpoint.every": str(EVERY),
    "model.layers": "1",  # what is saved and restored does not depend on how many there are
    "plan.cluster": "h100",
    "plan.search": "list",
    "output.record_every": "5",
}


def child(folder: str, settings: dict[str, str]) -> dict[str, str]:
    """Train as one rank in `folder`; returns the error that ended it, if one did."""
    from interlace.train.worker import main

    os.chdir(folder)
    try:
        main(load_run_config("run.toml", settings))
    except InterlaceError as error:
        return {"error": error.message, "hint": error.hint}
    return {"error": ""}


class Runs:
    """A workplace for runs with checkpoints; each run is named by its output directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = Workplace(folder).folder
        self._env = {"XDG_CACHE_HOME": str(folder / "cache")}

    def train(
        self,
        out: str,
        ranks: int = 1,
        *,
        target: str = "checkpoint_runs:child",
        more: Sequence[Any] = (),
        **settings: Any,
    ) -> list[RankResult]:
        """Run to the end; settings are written `checkpoint__keep=3`. `target` takes `more` behind
        what `child` takes."""
        args = [str(self.folder), self._settings(out, ranks, settings), *more]
        return run_ranks(target, ranks, args=args, timeout_s=LIMIT_S, env=self._env)

    @contextlib.contextmanager
    def started(self, out: str, ranks: int, **settings: Any) -> Iterator[Any]:
        """The running ranks."""
        args = [str(self.folder), self._settings(out, ranks, settings)]
        with start_ranks(
            "checkpoint_runs:child", ranks, args=args, timeout_s=LIMIT_S, env=self._env
        ) as running:
            yield running

    def end(
        self,
        out: str,
        ranks: int,
        number: signal.Signals,
        after_step: int,
        delay_s: float,
        **settings: Any,
    ) -> bool:
        """Start, and signal every rank `delay_s` after a checkpoint of `after_step` or a later step
        is there. Whether that was before the end."""
        with self.started(out, ranks, **settings) as running:
            deadline = time.monotonic() + LIMIT_S
            while not any(step >= after_step for step in self.steps(out)):
                assert time.monotonic() < deadline, running.report()
                assert len(running.running()) == ranks, running.report()
                time.sleep(0.005)
            time.sleep(delay_s)
            alive = running.running()
            for rank in alive:
                running.signal(rank, number)
            running.wait()
        return len(alive) == ranks

    def config(self, out: str, **settings: Any) -> RunConfig:
        """What a run of one rank would be given, with paths from here."""
        given = self._settings(str(self.folder / out), 1, settings)
        return load_run_config(str(self.folder / "run.toml"), given)

    def _settings(self, out: str, ranks: int, settings: dict[str, Any]) -> dict[str, str]:
        given = {key.replace("__", "."): str(value) for key, value in settings.items()}
        layout = {"parallel.tensor": str(ranks), "output.directory": out}
        return SETTINGS | layout | given

    def checkpoints(self, out: str) -> Path:
        """Where a run keeps them."""
        return self.folder / out / "checkpoints"

    def checkpoint(self, out: str, step: int = STEPS) -> Path:
        """The folder of one."""
        return self.checkpoints(out) / f"step-{step:08d}"

    def steps(self, out: str) -> list[int]:
        """Steps with a visible checkpoint, oldest first."""
        return sorted(int(path.name[5:]) for path in self.checkpoints(out).glob("step-????????"))

    def events(self, out: str, name: str) -> list[dict[str, Any]]:
        """Events of one kind, as reports read them."""
        events = read_metrics(self.folder / out / "metrics.jsonl")
        return [event for event in events if event["event"] == name]

    def losses(self, out: str) -> list[float]:
        """Of every step; JSON keeps every bit of a float."""
        return [event["loss"] for event in self.events(out, "step")]

    def actions(self, out: str, action: str) -> list[dict[str, Any]]:
        """What checkpoints did."""
        return [event for event in self.events(out, "checkpoint") if event["action"] == action]


def contents(folder: Path) -> dict[str, Any]:
    """Every global tensor of a checkpoint (as bytes of numpy), its files checked, and its state."""
    manifest, reader = sound_manifest(folder), CheckpointReader(folder)
    tensors = {name: whole_tensor(reader, name).numpy().tobytes() for name in manifest.tensors}
    return tensors | {"state": manifest.state, "step": manifest.step}


def differing(one: Path, other: Path) -> list[str]:
    """Names that differ in any bit between two checkpoints."""
    a, b = contents(one), contents(other)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
