"""A checkpoint of a run as a Hugging Face folder, on one process without a process group."""

import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, StorageReader, TensorStorageMetadata

from interlace.checkpoint.folders import (
    Damaged,
    check_file,
    folder_name,
    read_manifest,
    saved_steps,
)
from interlace.checkpoint.manifest import MANIFEST, WEIGHTS, Manifest
from interlace.checkpoint.tensor_files import CheckpointReader, check_headers, whole_tensor
from interlace.errors import InputError
from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.models import model_file

_MODEL = f"{WEIGHTS}model."
"""The loss module calls the model `model`."""
_EMBEDDING = "embedding.weight"
"""What the name of the embedding ends with; what stands before it is the prefix of all names."""


def find_checkpoint(path: Path) -> tuple[Path, Manifest, list[str]]:
    """A sound checkpoint, given itself, its directory or its run, whose newest sound one is taken;
    and what was wrong with newer ones. Raises InputError if there is none."""
    if (path / MANIFEST).exists():
        return path, sound_manifest(path), []
    if (path / ".metadata").exists():
        raise InputError(
            f"{path} is of torch.distributed.checkpoint: reading it runs code in its files",
            hint="say --trust-dcp if you trust everyone who could write to it",
        )
    directories = [path, *_named_in_run(path), path / "checkpoints"]
    directory = next((each for each in directories if saved_steps(each)), None)
    if directory is None:
        raise InputError(
            f"{path} holds no checkpoint",
            hint="give the output directory of a run with checkpoint.every set, or one checkpoint",
        )
    problems: list[str] = []
    for step in saved_steps(directory):
        folder = directory / folder_name(step)
        try:
            return folder, sound_manifest(folder), problems
        except Damaged as error:
            problems.append(error.message)
    raise InputError(f"no checkpoint in {directory} is sound: {problems[0]}")


def export_checkpoint(folder: Path, manifest: Manifest, output: Path, dtype: torch.dtype) -> None:
    """Write the weights of a sound checkpoint for `transformers`. Reads a file's worth at a time.

    Raises InputError if `output` exists or the model has no counterpart in `transformers`.
    """
    model = _model_config(folder, manifest)
    names = [name.removeprefix(_MODEL) for name in manifest.tensors if name.startswith(_MODEL)]
    weights = Weights(CheckpointReader(folder), _MODEL, names)
    if model.source == "hugging_face":
        export_as_it_was(weights, model, output, dtype)
        return
    from interlace.models.hugging_face import export  # noqa: PLC0415  imports safetensors

    sequence_length = manifest.config["data"]["sequence_length"]
    export(weights, model, output, sequence_length=sequence_length, dtype=dtype)


def sound_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, all files of which were checked. Raises Damaged."""
    manifest = read_manifest(folder)
    for file in manifest.files:
        check_file(folder, file)
    check_headers(folder, manifest, [file.name for file in manifest.files])
    return manifest


def export_trusted_dcp(
    folder: Path, model: ModelConfig, sequence_length: int, output: Path, dtype: torch.dtype
) -> None:
    """Write the weights in a folder of `torch.distributed.checkpoint` for `transformers`.

    Loading unpickles its metadata, which runs what its author wrote. The tensors may have any
    common prefix before the names of `model`, one of `interlace.models`.
    """
    from interlace.models.hugging_face import export  # noqa: PLC0415  imports safetensors

    if not (folder / ".metadata").is_file():
        raise InputError(
            f"{folder} has no .metadata, so it is not of torch.distributed.checkpoint",
            hint="leave out --trust-dcp for a checkpoint of interlace",
        )
    if model.source == "hugging_face":
        raise InputError(
            "--trust-dcp converts weights under the names of interlace.models, and the model has "
            'model.source = "hugging_face"',
            hint="load them with torch.distributed.checkpoint and call save_pretrained",
        )
    reader = FileSystemReader(folder)
    saved = {
        name: each
        for name, each in reader.read_metadata().state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    ends = [name for name in saved if f".{name}".endswith(f".{_EMBEDDING}")]
    if len(ends) != 1:
        raise InputError(
            f"{folder} has {len(ends)} tensors that are called {_EMBEDDING}, and one is needed",
            hint="only weights under the names of interlace.models can be converted",
        )
    model = replace(model, vocab_size=saved[ends[0]].size[0])
    with torch.device("meta"):
        shape = model_file(model.architecture).build(model, model.vocab_size, sequence_length)
    prefix = ends[0].removesuffix(_EMBEDDING)
    names = [name for name, _ in shape.named_parameters() if prefix + name in saved]
    weights = Weights(reader, prefix, names)
    export(weights, model, output, sequence_length=sequence_length, dtype=dtype)


def export_as_it_was(
    weights: Mapping[str, Tensor], model: ModelConfig, output: Path, dtype: torch.dtype
) -> None:
    """A model that `transformers` defines: its own way to save it, with these weights."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    if not Path(model.config, "config.json").is_file():
        raise InputError(
            f"model.config = {model.config!r}, which describes the model, is not there",
            hint="run this where the run was started, with its config.json where it was",
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} exists", hint="give a new folder")
    config = AutoConfig.from_pretrained(
        model.config, local_files_only=True, trust_remote_code=False
    )
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    state = {name: weights[name].to(dtype) for name in weights}
    part = output.with_name(f"{output.name}.partial")
    shutil.rmtree(part, ignore_errors=True)  # of an export that was cut off
    shape.save_pretrained(part, state_dict=state)
    part.replace(output)


class Weights(Mapping[str, Tensor]):
    """Whole weights by the model's own names, each read when it is asked for."""

    def __init__(self, reader: StorageReader, prefix: str, names: list[str]) -> None:
        self._reader, self._prefix, self._names = reader, prefix, names

    def __getitem__(self, name: str) -> Tensor:
        return whole_tensor(self._reader, self._prefix + name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _model_config(folder: Path, manifest: Manifest) -> ModelConfig:
    saved = manifest.config.get("model")
    vocabulary = manifest.state.get("vocabulary")
    experts = saved.get("experts", {}) if isinstance(saved, dict) else None
    known = _known(saved, ModelConfig) and _known(experts, ExpertsConfig)
    if not known or not isinstance(vocabulary, int):
        raise InputError(
            f"{folder} does not describe its model as this version of interlace does",
            hint="export with the version of interlace that wrote it: "
            f"{manifest.state.get('versions')}",
        )
    # JSON has lists only, and a configuration has tuples.
    plain: dict[str, Any] = {
        key: tuple(each) if isinstance(each, list) else each for key, each in saved.items()
    }
    plain["experts"] = ExpertsConfig(**experts)
    return replace(ModelConfig(**plain), vocab_size=vocabulary)


def _known(values: Any, type_: type) -> TypeGuard[dict[str, Any]]:
    """Whether these are fields of that dataclass, some or all."""
    return isinstance(values, dict) and values.keys() <= {field.name for field in fields(type_)}


def _named_in_run(path: Path) -> list[Path]:
    """The directory that a run's own run.toml names."""
    try:
        config: Any = tomllib.loads((path / "run.toml").read_text(encoding="utf-8"))
        named = config.get("checkpoint", {}).get("directory")
    except (OSError, ValueError, AttributeError):  # no run, or not one of ours: no directory
        return []
    return [Path(named)] if isinstance(named, str) and named else []
