"""Data files to documents, by suffix: text, JSON lines, and token ids that were made elsewhere.

Files are read as a stream: of JSON lines one line is in memory, of token ids one chunk.
"""

import gzip
import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from interlace.errors import InputError, nearest

JSON_LINES = (".jsonl", ".jsonl.gz")
"""Endings of files with one JSON object, a document, on each line."""
TOKEN_IDS = (".bin", ".npy")
"""Endings of files that hold ids of tokens and not text."""
# They hold data for certain, and nothing here can read them: skipping them would lose it.
REFUSED = (".parquet", ".arrow", ".npz", ".jsonl.zst", ".jsonl.xz", ".jsonl.bz2")

CHUNK_TOKENS = 1 << 20
"""Tokens that are read at a time; a choice, 4 MB of 32-bit ids."""
# Where nothing says how large the vocabulary is. Ids of uint16 read as uint32 exceed it.
LARGEST_VOCABULARY = 1 << 24

NOTE_TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
"""Types of the ids, by the names that the note beside a .bin file may give them."""

# Header of a Megatron-LM index: magic, version, code of the type, sequences, documents + 1.
# Then int32 [sequences] lengths in tokens, int64 [sequences] offsets, int64 [documents + 1].
_INDEX = struct.Struct("<9sQBQQ")
_INDEX_START = (b"MMIDIDX\0\0", 1)
"""Magic bytes and version that such an index begins with."""
_INDEX_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of the ids by Megatron-LM's codes; 6 and 7 are floating point."""


def holds_ids(path: Path) -> bool:
    """Whether the file holds token ids and not text, by its name."""
    return path.name.lower().endswith(TOKEN_IDS)


def companions(path: Path) -> list[Path]:
    """The files beside `NAME.bin` that may say how its ids are written, whether they exist or not:
    `NAME.bin.json` and the Megatron-LM index `NAME.idx`."""
    if path.suffix.lower() != ".bin":
        return []
    return [Path(f"{path}.json"), path.with_suffix(".idx")]


def read_texts(path: Path, field: str) -> Iterator[bytes]:
    """Each document of a text or JSON-lines file, in order.

    A text file is one document, whatever its bytes; each line of JSON has one in `field`, as UTF-8,
    and blank lines are passed over. InputError names the file and the line.
    """
    name = path.name.lower()
    if name.endswith(REFUSED):
        raise InputError(
            f"{path} is of a kind that cannot be read",
            hint="convert it to .jsonl, .jsonl.gz, .npy or .bin, or leave it out of data.path",
        )
    with _reading(path):
        if not name.endswith(JSON_LINES):
            yield path.read_bytes()
            return
        with gzip.open(path) if name.endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of(line, field, f"{path}, line {number}")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot read {path}: {reason}",
            hint="repair it or make it readable, or set data.path so that it does not match",
        ) from error


def _text_of(line: bytes, field: str, place: str) -> bytes:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{place} is not JSON: {error}",
            hint="each line is one JSON object in UTF-8; repair or remove that line",
        ) from error
    if not isinstance(record, dict):
        raise InputError(
            f"{place} holds {_kind(record)} and not an object",
            hint=f'write each document as {{"{field}": "..."}}',
        )
    if field not in record:
        raise InputError(
            f"{place} has no field {field!r}, which data.field names",
            hint=f"set data.field: {nearest(field, record)}" if record else "remove that line",
        )
    text = record[field]
    if not isinstance(text, str):
        raise InputError(
            f"{place}: {field!r} is {_kind(text)} and not a string",
            hint="set data.field to the field with the text, or remove that line",
        )
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{place}: {field!r} holds half of a surrogate pair, which is no character",
            hint="write characters beyond U+FFFF as they are, or as two \\u escapes",
        ) from error


def _kind(value: object) -> str:
    names = {"NoneType": "null", "list": "a list", "dict": "an object", "str": "a string"}
    return names.get(type(value).__name__, "a number or truth value")


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """An opened file of token ids."""

    path: Path
    ids: np.ndarray
    """Any integer type, [tokens], read from disk as it is used."""
    documents: int
    """As the Megatron-LM index counts them; 1 where there is none."""

    def chunks(self, vocab_size: int) -> Iterator[np.ndarray]:
        """The ids in order, in parts of at most CHUNK_TOKENS.

        InputError, with the place, for an id that is negative or not below `vocab_size`; a
        `vocab_size` of 0 stands for LARGEST_VOCABULARY.
        """
        limit = vocab_size or LARGEST_VOCABULARY
        for first in range(0, len(self.ids), CHUNK_TOKENS):
            chunk = np.asarray(self.ids[first : first + CHUNK_TOKENS])
            wrong = (chunk < 0) | (chunk >= limit)
            if wrong.any():
                index = int(wrong.argmax())
                raise InputError(
                    f"{self.path}: the id at index {first + index:,} (from 0) is {chunk[index]:,}, "
                    f"and ids are 0 to {limit - 1:,}",
                    hint="set data.tokenizer or model.vocab_size to what the ids were made with"
                    if vocab_size
                    else "check the type of the ids, or set model.vocab_size",
                )
            yield chunk


def open_ids(path: Path) -> TokenIds:
    """Open a .npy array of one dimension, or a .bin of raw little-endian ids.

    The type of a .bin comes from a file beside it: see `companions`. InputError if there is none,
    if the two disagree, or if the file is empty or no such array.
    """
    with _reading(path):
        opened = _open_bin(path) if path.suffix.lower() == ".bin" else _open_npy(path)
    if not len(opened.ids):
        raise InputError(
            f"{path} holds no token ids",
            hint="write it again, or leave it out of data.path",
        )
    return opened


def _open_npy(path: Path) -> TokenIds:
    try:
        ids = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise InputError(
            f"{path} is not a whole .npy array: {error}",
            hint="write it again with numpy.save",
        ) from error
    if ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise InputError(
            f"{path} holds {ids.dtype} of shape {list(ids.shape)}, and token ids are integers of "
            "one dimension",
            hint="save it again as ids.astype(numpy.uint32).ravel()",
        )
    return TokenIds(path=path, ids=ids, documents=1)


def _open_bin(path: Path) -> TokenIds:
    note, index = companions(path)
    if note.exists():
        source, (dtype, tokens), documents = note, _read_note(note), 1
    elif index.exists():
        source = index
        dtype, tokens, documents = _read_index(index)
    else:
        raise InputError(
            f"{path}: nothing says of which type its token ids are",
            hint=f'write {{"dtype": "uint16"}} or {{"dtype": "uint32"}} to {note.name} beside it, '
            f"or put its Megatron index {index.name} there; if it holds no token ids, leave it "
            "out of data.path",
        )
    size_bytes = path.stat().st_size
    found, rest = divmod(size_bytes, dtype.itemsize)
    if rest or tokens not in (None, found):
        wanted = "" if tokens is None else f"; {source.name} says {tokens:,} ids"
        raise InputError(
            f"{path} is {size_bytes:,} bytes long: {found:,} ids of type {dtype.name} and {rest} "
            f"bytes over{wanted}",
            hint=f"the file was cut short, or {source.name} is not about it; write both again",
        )
    ids = np.memmap(path, dtype, mode="r") if size_bytes else np.empty(0, dtype)
    return TokenIds(path=path, ids=ids, documents=documents)


def _read_note(note: Path) -> tuple[np.dtype, int | None]:
    """Type and, if the note has it, number of ids."""
    with _reading(note):
        raw = note.read_bytes()
    try:
        facts = json.loads(raw)
    except (ValueError, RecursionError) as error:
        facts = error
    if not isinstance(facts, dict) or not {"dtype"} <= set(facts) <= {"dtype", "tokens"}:
        raise InputError(
            f"{note} is not an object with `dtype` and perhaps `tokens`: {facts}",
            hint='write {"dtype": "uint16"}, or {"dtype": "uint32", "tokens": 1000}',
        )
    dtype, tokens = facts["dtype"], facts.get("tokens")
    known = isinstance(dtype, str) and dtype in NOTE_TYPES
    if not known or not (tokens is None or type(tokens) is int):
        raise InputError(
            f"{note} says dtype = {dtype!r}, tokens = {tokens!r}",
            hint="dtype is uint16 or uint32, always little-endian; tokens is a whole number",
        )
    return NOTE_TYPES[dtype], tokens


def _read_index(index: Path) -> tuple[np.dtype, int, int]:
    """Type, number of ids and number of documents from a Megatron-LM index."""
    with _reading(index), index.open("rb") as file:
        head = file.read(_INDEX.size).ljust(_INDEX.size, b"\0")
        *start, code, sequences, ends = _INDEX.unpack(head)
        size_bytes = index.stat().st_size
        whole = size_bytes >= _INDEX.size + 12 * sequences + 8 * ends
        if tuple(start) != _INDEX_START or code not in _INDEX_TYPES or not whole:
            raise InputError(
                f"{index} is not a whole Megatron index of token ids",
                hint="copy it again from where its .bin was made",
            )
        lengths = np.memmap(file, "<i4", mode="r", offset=_INDEX.size, shape=(sequences,))
        return np.dtype(_INDEX_TYPES[code]), int(lengths.sum(dtype=np.int64)), max(0, ends - 1)
