"""Write weights as a Hugging Face checkpoint."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from interlace.errors import InputError
from interlace.model_config import ModelConfig
from interlace.models import model_file
from interlace.models.hugging_face_config import config_json, family_for
from interlace.models.hugging_face_files import INDEX, SINGLE
from interlace.models.hugging_face_names import pieces

SHARD_BYTES = 5 * 10**9
"""Most bytes of one file of a checkpoint: the default of `save_pretrained` in `transformers` 4 (5
GB)."""


def export(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    folder: str | Path,
    *,
    sequence_length: int,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint that `transformers` loads: `config.json` and safetensors files of at most
    `shard_bytes`, unless one tensor is larger.

    `state` has the whole parameters or DTensors by name, and may make them when asked; they are
    looked up one file at a time, by every rank in the same order, and rank 0 writes. `config` is
    of Interlace's own models, `vocab_size` set. The folder appears under its name when it is
    complete. Raises InputError if it exists, or if `state` is not of this model.
    """
    if config.architecture == "gpt" and config.kv_heads != config.heads:
        raise InputError(
            f"GPT-2 has no grouped queries, and model.kv_heads = {config.kv_heads} differs from "
            f"model.heads = {config.heads}",
            hint="only models with kv_heads = heads can be exported",
        )
    family_for(config)
    folder, writes = Path(folder), not dist.is_initialized() or dist.get_rank() == 0
    if writes and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists", hint="give a new folder")
    groups = _groups(state, config, sequence_length)
    files = _split(groups, dtype.itemsize, shard_bytes)
    part = folder.with_name(f"{folder.name}.partial")
    if writes:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    for name, tensors in files.items():
        _write_file(state, {key: groups[key] for key in tensors}, dtype, part / name, writes=writes)
    if writes:
        if len(files) > 1:
            _write_index(files, groups, dtype.itemsize, part)
        described = config_json(config, sequence_length, str(dtype).removeprefix("torch."))
        _write_json(part / "config.json", described)
        part.replace(folder)


class _Part(NamedTuple):
    """A parameter of ours, or one slice of it along the first dimension, in a stored tensor."""

    name: str
    transposed: bool
    whole: torch.Size
    """Shape of the parameter."""
    row: int | None
    """Which slice."""

    def numel(self) -> int:
        return self.whole.numel() if self.row is None else self.whole[1:].numel()


_Group = list[_Part]
"""The parts that make up one stored tensor, put behind each other along the first dimension."""


def _groups(
    state: Mapping[str, Tensor], config: ModelConfig, sequence_length: int
) -> dict[str, _Group]:
    with torch.device("meta"):
        model = model_file(config.architecture).build(config, config.vocab_size, sequence_length)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    odd = sorted(shapes.keys() ^ (state.keys() - ({"head.weight"} if config.tied_head else set())))
    if odd:
        raise InputError(
            f"the weights are not of this model: {odd[0]} is only in one of them",
            hint="export with the configuration of the run that made them",
        )
    groups: dict[str, _Group] = {}
    for name, piece in pieces(family_for(config), shapes).items():
        for row, tensor in enumerate(piece.tensors(shapes[name][0])):
            number = row if "#" in piece.tensor else None
            part = _Part(name, piece.transposed, shapes[name], number)
            groups.setdefault(tensor, []).append(part)
    return groups


def _bytes(group: _Group, itemsize: int) -> int:
    return sum(part.numel() for part in group) * itemsize


def _split(groups: Mapping[str, _Group], itemsize: int, limit: int) -> dict[str, list[str]]:
    """Stored names by file name, in the order of the model."""
    files: list[list[str]] = []
    filled = limit
    for name, group in groups.items():
        size = _bytes(group, itemsize)
        if filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    if len(files) == 1:
        return {SINGLE: files[0]}
    count = len(files)
    return {f"model-{i:05}-of-{count:05}.safetensors": names for i, names in enumerate(files, 1)}


@torch.no_grad()
def _write_file(
    state: Mapping[str, Tensor],
    groups: Mapping[str, _Group],
    dtype: torch.dtype,
    path: Path,
    *,
    writes: bool,
) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415 - an extra

    wholes = _Wholes(state, dtype, keeps=writes)
    tensors = {}
    for key, group in groups.items():
        parts = [wholes.part(part) for part in group]
        if writes:
            joined = torch.cat(parts) if len(parts) > 1 else parts[0]
            tensors[key] = (joined.t() if group[0].transposed else joined).contiguous()
    if writes:
        save_file(tensors, path, metadata={"format": "pt"})
        _sync(path)


class _Wholes:
    """Whole parameters, each looked up once for parts that follow each other."""

    def __init__(self, state: Mapping[str, Tensor], dtype: torch.dtype, *, keeps: bool) -> None:
        self.state, self.dtype, self.keeps = state, dtype, keeps
        self.held: tuple[str, Tensor] | None = None

    def part(self, part: _Part) -> Tensor:
        """A copy on the CPU on the rank that keeps it, else something empty. Collective."""
        if self.held is None or self.held[0] != part.name:
            self.held = None  # let go of one before the next is made
            self.held = part.name, self._whole(part)
        whole = self.held[1]
        if not self.keeps:
            return whole
        each = whole if part.row is None else whole[part.row]
        return each.to("cpu", self.dtype, copy=part.row is not None)

    def _whole(self, part: _Part) -> Tensor:
        tensor = self.state[part.name]
        if tensor.shape != part.whole:
            raise InputError(
                f"{part.name} has shape {list(tensor.shape)}, and this model needs "
                f"{list(part.whole)}",
                hint="export with the configuration of the run that made it",
            )
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.detach() if self.keeps else torch.empty(0)


def _write_index(
    files: Mapping[str, list[str]], groups: Mapping[str, _Group], itemsize: int, folder: Path
) -> None:
    total = sum(_bytes(group, itemsize) for group in groups.values())
    where = {key: name for name, keys in files.items() for key in keys}
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
