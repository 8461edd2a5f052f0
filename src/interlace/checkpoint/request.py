"""What a configuration asks of checkpoints, and whether that can be, before anything is built."""

import tomllib
from pathlib import Path
from typing import Any

from interlace.checkpoint.folders import (
    Damaged,
    check_file,
    folder_name,
    read_manifest,
    saved_steps,
)
from interlace.checkpoint.manifest import MANIFEST, Manifest
from interlace.claims import Claim, Claims
from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.run_files import METRICS, RUN, read_metrics

# Tables and fields that may differ on resuming without a word: they change no number.
_FREE = ("output", "checkpoint", "hardware", "watchdog", "link", "plan", "compare")
_FREE_FIELDS = ("model.config", "data.path", "train.threads", "train.evaluate_every")
"""Single fields that may differ in the same way."""
# The only fields of the model that may differ: rows are compared by shape, the others are told.
_TOLD = (
    "model.vocab_size",
    "model.dropout",
    "model.experts.auxiliary_weight",
    "model.experts.bias_speed",
    "model.experts.capacity_factor",
)


def checkpoint_directory(config: RunConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.checkpoint.directory or Path(config.output.directory) / "checkpoints")


def claims_of(config: RunConfig, token: str) -> Claims:
    """The rights to write that a run needs; nothing is taken yet."""
    output = Claim(Path(config.output.directory), "output.directory", token)
    directory = checkpoint_directory(config)
    if not config.checkpoint.every:
        return Claims(output, None)
    if directory.resolve() == output.directory.resolve():
        return Claims(output, output)
    field = "checkpoint.directory" if config.checkpoint.directory else "output.directory"
    return Claims(output, Claim(directory, field, token))


def can_resume(config: RunConfig) -> bool:
    """Whether a run goes on from its own checkpoints, so that its output directory is its own."""
    directory = checkpoint_directory(config)
    if config.checkpoint.resume in ("", "latest"):
        return bool(config.checkpoint.resume and saved_steps(directory))
    return Path(config.checkpoint.resume).resolve().parent == directory.resolve()


def was_cut_off(config: RunConfig) -> bool:
    """Whether the output directory holds a run of the same kind, `resume = "latest"`, that ended
    before its first checkpoint: the same command starts it again."""
    if config.checkpoint.resume != "latest" or saved_steps(checkpoint_directory(config)):
        return False
    directory = Path(config.output.directory)
    try:
        earlier = tomllib.loads((directory / RUN).read_text(encoding="utf-8"))
        events = read_metrics(directory / METRICS)
    except (OSError, ValueError, InputError):  # not a run of ours, or it has not begun
        return False
    wanted = earlier.get("checkpoint")
    if not isinstance(wanted, dict) or wanted.get("resume") != "latest" or not wanted.get("every"):
        return False
    return not any(each["event"] == "end" or each.get("action") == "saved" for each in events)


def check_request(config: RunConfig) -> int:
    """Raise InputError if checkpoints cannot be written or taken up as asked. First rank only.

    Returns the epoch of the newest checkpoint in the run's directory, 0 if there is none.
    """
    directory = checkpoint_directory(config)
    steps = saved_steps(directory)
    newest = _newest(directory, steps)
    epoch = newest.epoch if newest else 0
    if not config.checkpoint.resume:
        if config.checkpoint.every and steps:
            raise InputError(
                f"{directory} holds checkpoints of an earlier run, up to step {steps[0]}",
                hint='set checkpoint.resume = "latest", or another checkpoint.directory',
            )
        return epoch
    if config.checkpoint.resume != "latest":
        manifest = _named(config)
        if config.checkpoint.every and steps and steps[0] > manifest.step:
            raise InputError(
                f"{directory} holds newer checkpoints (step {steps[0]}) than that of step "
                f"{manifest.step}, from which this run goes on",
                hint="set checkpoint.directory to another folder, or move the newer ones away",
            )
        check_model(config, manifest)
    elif newest:
        check_model(config, newest)
    return epoch


def finished_step(config: RunConfig) -> int:
    """The step with which the run that is to go on has ended, if that leaves nothing to do; else 0,
    also if its newest checkpoint is damaged. First rank only."""
    directory = checkpoint_directory(config)
    steps = saved_steps(directory)
    if config.checkpoint.resume != "latest" or not steps or steps[0] < config.train.steps:
        return 0
    try:
        events = read_metrics(Path(config.output.directory) / METRICS)
        folder = directory / folder_name(steps[0])
        for file in read_manifest(folder).files:
            check_file(folder, file)
    except (InputError, Damaged):  # what is wrong is told by what comes next
        return 0
    ended = [each.get("reason") for each in events if each["event"] == "end"]
    return steps[0] if ended and ended[-1] == "finished" else 0


def check_model(config: RunConfig, manifest: Manifest) -> None:
    """Raise InputError if the configuration describes another model than the checkpoint's."""
    for name, old, new in _differences(config, manifest):
        if name.startswith("model.") and name not in _TOLD:
            raise InputError(
                f"the checkpoint was trained with {name} = {old!r}, and this run has {new!r}",
                hint=f"set {name} to {old!r}, or checkpoint.resume to empty",
            )


def changed_settings(config: RunConfig, manifest: Manifest) -> list[str]:
    """Settings that differ from the checkpoint's and change the numbers, as `name: old -> new`."""
    return [f"{name}: {old!r} -> {new!r}" for name, old, new in _differences(config, manifest)]


def _named(config: RunConfig) -> Manifest:
    folder = Path(config.checkpoint.resume)
    if not (folder / MANIFEST).exists():
        foreign = (folder / ".metadata").exists()
        raise InputError(
            f"checkpoint.resume = {config.checkpoint.resume!r} "
            + ("is of torch.distributed.checkpoint" if foreign else f"has no {MANIFEST}"),
            hint="loading it would run code in its files; if you trust them, interlace export "
            "--trust-dcp makes a folder for model.config"
            if foreign
            else 'give the folder of one checkpoint (".../step-00000100"), or latest',
        )
    return read_manifest(folder)


def _newest(directory: Path, steps: list[int]) -> Manifest | None:
    """The newest manifest that can be read; what is damaged is told when it is taken up."""
    for step in steps:
        try:
            return read_manifest(directory / folder_name(step))
        except Damaged:
            continue
    return None


def _differences(config: RunConfig, manifest: Manifest) -> list[tuple[str, Any, Any]]:
    """(field, saved value, present value) of each field that may matter."""
    found = []
    for table, values in config.as_dict().items():
        if table not in _FREE and isinstance(values, dict):
            found += _in_table(table, values, manifest.config.get(table))
    return [each for each in found if each[0] not in _FREE_FIELDS]


def _in_table(table: str, values: dict[str, Any], saved: Any) -> list[tuple[str, Any, Any]]:
    """The fields of a table, and of those within it, that differ from saved ones."""
    if not isinstance(saved, dict):
        return []
    found = []
    for key, value in values.items():
        name, new = f"{table}.{key}", list(value) if isinstance(value, tuple) else value
        if isinstance(new, dict):
            found += _in_table(name, new, saved.get(key))
        elif key in saved and saved[key] != new:
            found.append((name, saved[key], new))
    return found
