"""Hugging Face checkpoints of our models: safetensors, in one file or several, no pickle.

`load_config` and `load_weights` read one, `export` writes one.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from interlace.errors import InputError
from interlace.models.hugging_face_config import family_of, load_config
from interlace.models.hugging_face_export import export
from interlace.models.hugging_face_files import Slices, StoredTensor, open_tensors
from interlace.models.hugging_face_names import Family, StoredPart, pieces

__all__ = ["export", "load_config", "load_weights"]

_FUSED = ".experts.gate_up_proj"
"""How the name of a tensor ends that holds two weights of all experts of a layer."""


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill the parameters of `model`, a model of `interlace.models`, from a checkpoint.

    A rank reads only its parts of parameters that are DTensors. Learned positions may be fewer than
    the stored ones: the first are taken. Raises InputError, before any weight changes, for files
    that are broken and for tensors that are missing, left over or of another shape.
    """
    family = family_of(folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with ExitStack() as stack:
        stored = open_tensors(Path(folder), family.prefix, stack)
        fused = any(name.endswith(_FUSED) for name in stored)
        wanted = pieces(family, parameters, fused=fused)
        tied = _tied_head(parameters)
        if tied and wanted["head.weight"].tensor not in stored:
            del parameters["head.weight"]
        tensors = {name: wanted[name].tensors(len(each)) for name, each in parameters.items()}
        _check_names(folder, family, stored, {each for names in tensors.values() for each in names})
        for name, parameter in parameters.items():
            for each in tensors[name]:
                _check_shape(folder, name, parameter, wanted[name], each, stored[each])
        if tied and "head.weight" in parameters:
            _check_tied(folder, parameters, wanted, stored)
        for name, parameter in parameters.items():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(_read(parameter, wanted[name], stored))


def _tied_head(parameters: Mapping[str, nn.Parameter]) -> bool:
    return parameters["head.weight"] is parameters["embedding.weight"]


def _check_names(
    folder: str | Path, family: Family, stored: Mapping[str, StoredTensor], wanted: set[str]
) -> None:
    missing = sorted(wanted - stored.keys())
    left = sorted(name for name in stored.keys() - wanted if not family.ignored.fullmatch(name))
    for names, what in ((missing, "lacks"), (left, "has, and our model has no place for,")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InputError(
                f"{folder} {what} {', '.join(names[:3])}{more}",
                hint="config.json and the weights must be of the same model",
            )


def _check_shape(
    folder: str | Path,
    name: str,
    parameter: Tensor,
    piece: StoredPart,
    tensor: str,
    stored: StoredTensor,
) -> None:
    each = list(parameter.shape[1:] if "#" in piece.tensor else parameter.shape)
    each[piece.dim] *= piece.parts
    shape = tuple(each)
    found = stored.shape[::-1] if piece.transposed else stored.shape
    if found == shape:
        return
    if piece.longer and found[1:] == shape[1:]:
        if found[0] > shape[0]:
            return
        raise InputError(
            f"{folder}: {tensor} has {found[0]} positions, fewer than the {shape[0]} of a sequence",
            hint=f"set data.sequence_length to {found[0]} or less",
        )
    raise InputError(
        f"{folder}: {tensor} has shape {list(stored.shape)}, and {name} needs "
        f"{list(shape[::-1] if piece.transposed else shape)}",
        hint="config.json and the weights must be of the same model",
    )


def _check_tied(
    folder: str | Path,
    parameters: Mapping[str, nn.Parameter],
    wanted: Mapping[str, StoredPart],
    stored: Mapping[str, StoredTensor],
) -> None:
    """A checkpoint with a tied head may hold it as well, if it is the same."""
    parts = [
        _read(parameters[name], wanted[name], stored)
        for name in ("embedding.weight", "head.weight")
    ]
    if not torch.equal(*parts):
        raise InputError(
            f"{folder}: config.json ties the head to the embedding, and their weights differ",
            hint='set "tie_word_embeddings" to false in config.json',
        )


def _read(parameter: Tensor, piece: StoredPart, stored: Mapping[str, StoredTensor]) -> Tensor:
    """This rank's part of a parameter, in our order of dimensions."""
    region = list(_region(parameter))
    if "#" in piece.tensor:
        rows = piece.tensors(parameter.shape[0])[region[0]]
        return torch.stack([stored[each].read(tuple(region[1:])) for each in rows])
    first, part = piece.part * parameter.shape[piece.dim], region[piece.dim]
    region[piece.dim] = slice(first + part.start, first + part.stop)
    tensor = stored[piece.tensor]
    return tensor.read(tuple(region[::-1])).t() if piece.transposed else tensor.read(tuple(region))


def _region(parameter: Tensor) -> Slices:
    """Which part of the whole parameter this rank holds, one slice per dimension."""
    start, stop = [0] * parameter.dim(), list(parameter.shape)
    if isinstance(parameter, DTensor):
        coordinate = parameter.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(parameter.placements):
            if not isinstance(placement, Shard):
                assert placement.is_replicate()
                continue
            dim, ranks = placement.dim, parameter.device_mesh.size(axis)
            each = -(-(stop[dim] - start[dim]) // ranks)
            start[dim] = min(start[dim] + coordinate[axis] * each, stop[dim])
            stop[dim] = min(start[dim] + each, stop[dim])
    return tuple(map(slice, start, stop))
