"""The directories of a run: claimed, and refused where they hold what this run may not touch.

Before anything is built, for all ranks at once: what a configuration asks of checkpoints, and
whether that can be.
"""

import contextlib
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from interlace.checkpoint.folders import (
    Damaged,
    Saved,
    check_file,
    folder_name,
    read_manifest,
    saved_in,
)
from interlace.checkpoint.manifest import MANIFEST, Manifest
from interlace.claims import RESTART_WAIT_S, WAIT_S, Claims, claims_on, new_token
from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.ranks.small_collectives import broadcast_text
from interlace.run_files import METRICS, RUN, read_metrics, records_of

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


def claim_together(config: RunConfig) -> Claims:
    """The directories of this run, claimed by the first rank. `config` has the shape of a published
    model, as a checkpoint holds it. Collective; a refusal is raised on every rank alike."""
    claims: Claims | None = None
    answer: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            claims = claim_directory(config)
            epoch = claims.checkpoints.epoch if claims.checkpoints else 0
            answer = {"token": claims.output.token, "epoch": epoch, "finished": claims.finished}
        except InputError as error:
            answer = {"message": error.message, "hint": error.hint}
    answer = json.loads(broadcast_text(json.dumps(answer)))
    if "message" in answer:
        raise InputError(answer["message"], hint=answer["hint"])
    return claims or _join_claims(config, **answer)


def claim_directory(config: RunConfig) -> Claims:
    """Take the output directory, and that of checkpoints if there will be any, for this run.

    First rank only. Refuses a directory in which another run is live, or that holds another run.
    """
    directory = Path(config.output.directory)
    wait_s = RESTART_WAIT_S if config.checkpoint.resume else WAIT_S
    with contextlib.ExitStack() as refused:
        claims = _claims_of(config, new_token())
        refused.callback(claims.release)
        claims.output.take(wait_s)
        saved = saved_in(config.checkpoints)
        _check_request(config, saved)
        resumes = _can_resume(config, saved)
        replaces = config.output.overwrite or resumes or _was_cut_off(config, saved)
        if records_of(directory) and not replaces:
            raise InputError(
                f"output.directory = {config.output.directory!r} holds an earlier run",
                hint="choose another output.directory, or set output.overwrite = true",
            )
        if claims.separate is not None:
            claims.separate.take(wait_s)  # not before: it makes the folder
            saved = saved_in(config.checkpoints)  # of which nothing can change any more
            _check_request(config, saved)
            claims.separate.begin(saved.epoch)
        claims.output.begin(saved.epoch)
        refused.pop_all()
    return replace(claims, resumes=resumes, finished=_finished_step(config, saved))


def _join_claims(config: RunConfig, token: str, epoch: int, finished: int) -> Claims:
    """What the first rank claimed, for another rank; `epoch` is that of checkpoints.

    A rank with an output directory of its own takes that, unless a rank beside it has already.
    """
    claims = _claims_of(config, token)
    claims.output.take(RESTART_WAIT_S if config.checkpoint.resume else WAIT_S).begin()
    if claims.checkpoints is not None:
        claims.checkpoints.epoch = epoch
    return replace(claims, finished=finished)


def _claims_of(config: RunConfig, token: str) -> Claims:
    """The rights to write that a run needs; nothing is taken yet."""
    wanted, field = config.checkpoint, "checkpoint.directory"
    return claims_on(
        Path(config.output.directory),
        config.checkpoints if wanted.every else None,
        field if wanted.directory else "output.directory",
        token,
    )


def _can_resume(config: RunConfig, saved: Saved) -> bool:
    """Whether a run goes on from its own checkpoints, so that its output directory is its own."""
    if config.checkpoint.resume in ("", "latest"):
        return bool(config.checkpoint.resume and saved.steps)
    return Path(config.checkpoint.resume).resolve().parent == saved.directory.resolve()


def _was_cut_off(config: RunConfig, saved: Saved) -> bool:
    """Whether the output directory holds a run of the same kind, `resume = "latest"`, that ended
    before its first checkpoint: the same command starts it again."""
    if config.checkpoint.resume != "latest" or saved.steps:
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


def _check_request(config: RunConfig, saved: Saved) -> None:
    """Raise InputError if checkpoints cannot be written or taken up as asked, where the run's
    directory has `saved` ones. First rank only."""
    directory, steps = saved.directory, saved.steps
    if not config.checkpoint.resume:
        if config.checkpoint.every and steps:
            raise InputError(
                f"{directory} holds checkpoints of an earlier run, up to step {steps[0]}",
                hint='set checkpoint.resume = "latest", or another checkpoint.directory',
            )
        return
    if config.checkpoint.resume != "latest":
        manifest = _named(config)
        if config.checkpoint.every and steps and steps[0] > manifest.step:
            raise InputError(
                f"{directory} holds newer checkpoints (step {steps[0]}) than that of step "
                f"{manifest.step}, from which this run goes on",
                hint="set checkpoint.directory to another folder, or move the newer ones away",
            )
        check_model(config, manifest)
    elif saved.newest is not None:
        check_model(config, saved.newest)


def _finished_step(config: RunConfig, saved: Saved) -> int:
    """The step with which the run that is to go on has ended, if that leaves nothing to do; else 0,
    also if its newest checkpoint is damaged. First rank only."""
    steps = saved.steps
    if config.checkpoint.resume != "latest" or not steps or steps[0] < config.train.steps:
        return 0
    try:
        events = read_metrics(Path(config.output.directory) / METRICS)
        folder = saved.directory / folder_name(steps[0])
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
