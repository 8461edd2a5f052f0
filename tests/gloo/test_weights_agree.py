"""Proves that ranks of a run which hold other weights, state or data than the others all stop."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_runs import SETTINGS
from processes import run_ranks
from training import Workplace

from interlace.cli.run_file import load_run_config
from interlace.errors import PeerError, RunError
from interlace.models.hugging_face_files import folder_digest
from interlace.parallel.local_parts import local

pytestmark = pytest.mark.gloo
ODD = 1


def before_building(change: Callable[[], Any]) -> Any:
    """`train` in which the odd rank does something before it builds its model."""
    from interlace.train import opening

    build = opening.build_module

    def wrong(*args: Any) -> torch.nn.Module:
        if os.environ["RANK"] == str(ODD):
            change()
        return build(*args)

    return patch.object(opening, "build_module", wrong)


def after_building(name: str) -> Any:
    """`train` in which one element of a parameter or buffer of the odd rank is another one."""
    from interlace.train import opening

    build = opening.build_module

    def wrong(*args: Any) -> torch.nn.Module:
        module = build(*args)
        if os.environ["RANK"] == str(ODD):
            found = dict(module.named_parameters()) | dict(module.named_buffers())
            local(found[name]).view(-1)[1] += 1e-3
        return module

    return patch.object(opening, "build_module", wrong)


def after_step(number: int, change: Callable[[Any], None]) -> Any:
    """`train` in which the odd rank does something after a step."""
    from interlace.train.loop import Trainer

    step = Trainer._step

    def wrong(self: Trainer, done: int) -> None:
        step(self, done)
        if done == number and os.environ["RANK"] == str(ODD):
            change(self)

    return patch.object(Trainer, "_step", wrong)


def swap(name: str) -> Callable[[Any], None]:
    def change(trainer: Any) -> None:
        flat = local(trainer.session.weights.masters[name]).view(-1)
        flat[:2] = flat[:2].flip(0)

    return change


def momentum(name: str) -> Callable[[Any], None]:
    def change(trainer: Any) -> None:
        session = trainer.session
        master = session.weights.masters[name]
        local(session.optimizer.state[master]["exp_avg"]).view(-1)[0] += 1

    return change


def position(trainer: Any) -> None:
    trainer.batches.position += 2


FAULTS = {
    "seed": lambda: before_building(lambda: torch.manual_seed(99)),
    "norm": lambda: after_building("model.blocks.1.ffn_norm.weight"),
    "buffer": lambda: after_building("model.blocks.0.attention.rotary.sin"),
    "swapped": lambda: after_step(3, swap("model.head.weight")),
    "momentum": lambda: after_step(4, momentum("model.norm.weight")),
    "position": lambda: after_step(3, position),
}


def train(folder: str, settings: dict[str, str], fault: str) -> list[Any]:
    """A child: what a run with a fault says, and which checkpoints it leaves."""
    from interlace.train.worker import main

    os.chdir(folder)
    said: list[Any] = []
    with FAULTS[fault]():
        try:
            main(load_run_config("run.toml", settings))
        except PeerError as error:
            said = [error.message, list(error.ranks)]
    return [*said, sorted(path.name for path in Path("out/checkpoints").glob("step-*"))]


REPLICAS = {"parallel.tensor": "1", "parallel.data_replicate": "2"}
TENSOR = {"parallel.tensor": "2"}
SHARDS = {"parallel.tensor": "1", "parallel.data_shard": "2"}


@pytest.mark.parametrize(
    ("fault", "layout", "named", "kept"),
    [
        ("seed", REPLICAS, "weight 'model.embedding.weight'", []),
        ("seed", TENSOR, "the random state after the model was built", []),
        ("norm", TENSOR, "weight 'model.blocks.1.ffn_norm.weight'", []),
        ("buffer", SHARDS, "buffer 'model.blocks.0.attention.rotary.sin'", []),
        ("swapped", REPLICAS, "weight 'model.head.weight'", ["step-00000002"]),
        ("momentum", TENSOR, "exp_avg of the optimizer for 'model.norm.weight'", ["step-00000002"]),
        ("position", REPLICAS, "'the position in the data'", ["step-00000002"]),
    ],
)
def test_a_run_whose_ranks_differ_stops_and_writes_no_checkpoint(
    tmp_path: Path, fault: str, layout: dict[str, str], named: str, kept: list[str]
) -> None:
    """At the start, and where they came to differ on the way before the next checkpoint."""
    place = Workplace(tmp_path)
    changes = {"strands": "eager", "train.steps": "4", "output.directory": "out"}
    changes |= {"model.layers": "2"}
    results = run_ranks(
        "test_weights_agree:train",
        2,
        args=[str(tmp_path), SETTINGS | changes | layout, fault],
        env={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    for result in results:
        message, ranks, there = result.value
        assert message.startswith(f"rank 1 disagrees with the other 1 about {named}; "), message
        assert ranks == [ODD]
        assert there == kept
    assert place.folder == tmp_path


def resume(folder: str, settings: dict[str, str]) -> list[str]:
    """A child: take up a checkpoint from a disk of this rank's own."""
    from interlace.train.worker import main

    os.chdir(Path(folder) / os.environ["RANK"])
    try:
        main(load_run_config("run.toml", settings))
    except RunError as error:
        return [type(error).__name__, error.message]
    return []


def test_checkpoints_on_disks_of_their_own_are_looked_at_on_each(tmp_path: Path) -> None:
    """A rank reads what another one wrote, from a copy that only it sees."""
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
        Workplace(tmp_path / rank)
    settings = SETTINGS | REPLICAS | {"strands": "eager", "train.steps": "2"}
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    made = settings | {"output.directory": "out"}
    run_ranks("checkpoint_runs:child", 2, args=[str(tmp_path / "0"), made], env=cache)
    shutil.copytree(tmp_path / "0" / "out", tmp_path / "1" / "out")
    file = tmp_path / "1" / "out" / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again = made | {"train.steps": "4", "checkpoint.resume": "out/checkpoints/step-00000002"}
    for result in run_ranks("test_weights_agree:resume", 2, args=[str(tmp_path), again], env=cache):
        kind, message = result.value
        assert kind == "Damaged"
        assert "rank 1: the content of rank-00000.safetensors has changed" in message


def test_folders_of_weights_are_told_apart_by_sizes_heads_and_samples(tmp_path: Path) -> None:
    assert folder_digest(tmp_path / "none") == ""
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(bytes(3 << 20))
    config.write_text("{}")
    first = folder_digest(tmp_path)
    config.write_text('{"a": 1}')
    second = folder_digest(tmp_path)
    weights.write_bytes(bytes(2 << 20) + bytes([1]) * (1 << 20))
    assert len({first, second, folder_digest(tmp_path)}) == 3
