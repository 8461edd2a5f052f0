"""The tensors of a checkpoint folder: one safetensors file, or several with an index."""

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from interlace.errors import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names that `transformers` gives to a checkpoint's only file, and to the index of several."""

Slices = tuple[slice, ...]

_HEAD_BYTES, _SAMPLES, _SAMPLE_BYTES = 1 << 20, 64, 1 << 12
"""What `folder_digest` reads of each safetensors file: bytes at its beginning, where the header
lies, then so many samples, of so many bytes each, spread over it. A choice that
trades certainty for reading 1.25 MiB of a file, not all of its weights."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in an open file; a read touches only the part that is asked for."""

    file: Any
    name: str
    """As in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self, region: Slices) -> Tensor:
        """Part of the tensor, on the CPU."""
        return self.file.get_slice(self.name)[region]


def open_tensors(folder: Path, prefix: str, stack: ExitStack) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by name; files are open as long as `stack`. A checkpoint of a
    bare model, without its head, lacks `prefix` before its names: it is added.

    Raises InputError for files that are missing or broken.
    """
    where = _weight_map(folder)
    names = sorted(set(where.values())) if where else [SINGLE]
    found: dict[str, StoredTensor] = {}
    for name in names:
        file = _open(folder / name, stack)
        found |= {key: StoredTensor(file, key) for key in file.keys()}  # noqa: SIM118 - no dict
        lost = [key for key, own in where.items() if own == name and key not in found]
        if lost:
            raise InputError(f"{folder / name} lacks {lost[0]}, which {INDEX} says it holds")
    if any(key.startswith(prefix) for key in found):
        return found
    return {key if key.startswith("lm_head.") else prefix + key: v for key, v in found.items()}


def folder_digest(folder: Path) -> str:
    """A hash by which two hosts can tell whether they see the same checkpoint: JSON files whole, of
    each safetensors file the size, the first MiB and 64 samples of 4 KiB. Empty without files."""
    if not folder.is_dir():
        return ""
    found = hashlib.sha256()
    files = sorted(file for kind in ("*.json", "*.safetensors") for file in folder.glob(kind))
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if path.suffix == ".json":
                found.update(file.read())
                continue
            found.update(file.read(_HEAD_BYTES))
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest() if files else ""


def _weight_map(folder: Path) -> dict[str, str]:
    """File name by tensor name, as the index says; empty if there is a single file."""
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return {}
        raise InputError(
            f"{folder} has neither {SINGLE} nor {INDEX}",
            hint="pickled weights (.bin, .pt) are not read; save_pretrained of `transformers` "
            "writes safetensors",
        )
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        plain = bool(where) and all(Path(name).name == name for name in where.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is no index of safetensors files: {error!r}") from error
    if not plain:
        raise InputError(f"{index} names no files, or files outside its folder")
    return where


def _open(path: Path, stack: ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - an extra

    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"cannot read {path}: {error}", hint="the file may be cut off: fetch it again"
        ) from error
