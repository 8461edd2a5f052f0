"""The manifest of a checkpoint: which tensors there are, where each piece lies, and plain state.

    {"format": 1, "sha256": digest of body, "body": {step, mesh, config, state, files, tensors}}

What is parsed here may come from anywhere: names are file names of one form, sizes add up.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MANIFEST = "manifest.json"
"""Name of the file that says what is in a checkpoint."""
WEIGHTS, OPTIMIZER, RNG, BUFFERS = "weights.", "optimizer.", "rng.", "buffers."
"""What the names of the tensors of a run begin with."""
FORMAT = 1
"""Version of the manifest; raise it when readers of the last one would misread it."""
DTYPE_NAMES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
"""Types of tensors that a checkpoint may hold, as torch names them."""
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
"""Finds the name of a rank's file of tensors."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
"""Finds a SHA-256 digest in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A safetensors file of the folder."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBox:
    """A box of a tensor: element `offsets[d]` to `offsets[d] + sizes[d]` of each dimension d."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A global tensor; its pieces cover it once."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorBox, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but the numbers in its tensors."""

    step: int
    """Optimizer steps that were done."""
    mesh: dict[str, int]
    """Ranks per axis of the mesh that wrote it."""
    config: dict[str, Any]
    """The run's configuration."""
    state: dict[str, Any]
    """Plain values: data position, schedule, versions."""
    files: tuple[SavedFile, ...]
    tensors: dict[str, SavedTensor]
    epoch: int = 0
    """Which claim of the directory wrote it (claims.py); 0 if it does not say."""


def piece_key(name: str, offsets: tuple[int, ...], *, whole: bool) -> str:
    """Name of a piece inside its file: the tensor's own name if it is all of it."""
    return name if whole else f"{name}@{','.join(map(str, offsets))}"


def digest_of(body: Mapping[str, Any]) -> str:
    """sha256 over the body as canonical JSON."""
    text = json.dumps(body, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def parse_manifest(data: Any) -> Manifest:
    """A manifest from parsed JSON. Raises ValueError that says what is wrong with it."""
    data = _table(data, "it")
    if data.get("format") != FORMAT:
        raise ValueError(f"format {data.get('format')!r} is not {FORMAT}, which is read here")
    body = _table(data.get("body"), "body")
    if data.get("sha256") != digest_of(body):
        raise ValueError("its content has changed since it was written")
    files = tuple(_file(entry) for entry in _list(body.get("files"), "files"))
    known = {file.name for file in files}
    if len(known) < len(files):
        raise ValueError("a file is listed twice")
    tensors = {
        name: _tensor(name, entry, known)
        for name, entry in _table(body.get("tensors"), "tensors").items()
    }
    return Manifest(
        step=_count(body.get("step"), "step"),
        mesh={
            axis: _count(size, "mesh") for axis, size in _table(body.get("mesh"), "mesh").items()
        },
        config=_table(body.get("config"), "config"),
        state=_table(body.get("state"), "state"),
        files=files,
        tensors=tensors,
        epoch=_count(body.get("epoch", 0), "epoch"),
    )


def _file(entry: Any) -> SavedFile:
    entry = _table(entry, "a file")
    name, checksum = _text(entry.get("name"), "name"), _text(entry.get("sha256"), "sha256")
    if not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a checkpoint's file")
    if not _SHA256.fullmatch(checksum):
        raise ValueError(f"{name} has no checksum")
    return SavedFile(name=name, size_bytes=_count(entry.get("size_bytes"), name), sha256=checksum)


def _tensor(name: str, entry: Any, files: set[str]) -> SavedTensor:
    entry = _table(entry, name)
    shape = _counts(entry.get("shape"), name)
    pieces = tuple(_piece(name, each, shape, files) for each in _list(entry.get("pieces"), name))
    covered = sum(math.prod(piece.sizes) for piece in pieces)
    if covered != math.prod(shape):
        raise ValueError(f"the pieces of {name} have {covered} of {math.prod(shape)} elements")
    if (dtype := entry.get("dtype")) not in DTYPE_NAMES:
        raise ValueError(f"{name} has the unknown type {dtype!r}")
    return SavedTensor(dtype=dtype, shape=shape, pieces=pieces)


def _piece(name: str, entry: Any, shape: tuple[int, ...], files: set[str]) -> TensorBox:
    entry = _table(entry, name)
    piece = TensorBox(
        file=_text(entry.get("file"), name),
        key=_text(entry.get("key"), name),
        offsets=_counts(entry.get("offsets"), name),
        sizes=_counts(entry.get("sizes"), name),
    )
    if piece.file not in files:
        raise ValueError(f"{name} lies in {piece.file!r}, which is not among the files")
    if not len(piece.offsets) == len(piece.sizes) == len(shape):
        raise ValueError(f"a piece of {name} has other dimensions than {list(shape)}")
    ends = (offset + size for offset, size in zip(piece.offsets, piece.sizes, strict=True))
    if any(end > most for end, most in zip(ends, shape, strict=True)):
        raise ValueError(f"a piece of {name} lies outside of {list(shape)}")
    return piece


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a table")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is not a list")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} of {what} is not text")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} of {what} is not a count")
    return value


def _counts(value: Any, what: str) -> tuple[int, ...]:
    return tuple(_count(each, what) for each in _list(value, what))
