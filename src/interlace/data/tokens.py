"""Text to tokens, once: tokenizers, and the token file that every later start maps into memory.

The corpus is its documents one after the other, each followed by one separator. A separator
counts as one byte of text under every tokenizer, so bits per byte compare across tokenizers.
Token ids that were made elsewhere are taken as they are: their separators are among them.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from interlace.data.documents import companions, holds_ids, open_ids, read_texts
from interlace.errors import InputError, RunError, nearest

# Part of the cache key: raise it when records or header change.
FORMAT = 2
HEADER_BYTES = 4096
"""Room for the header of a file of tokens; a choice, one page of memory."""

# UTF-8 bytes of the form 10xxxxxx go on with a character that began before.
CONTINUATION_MASK = 0xC0
CONTINUATION_BYTE = 0x80
"""What such a byte is under the mask."""

# One token and the bytes of text that it stands for.
TOKEN_RECORD = np.dtype([("token", "<u4"), ("bytes", "<u4")])

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
"""Names that published tokenizers give to the token between documents; the first that exists."""


class Tokenizer(Protocol):
    """Turns one document into token records."""

    name: str
    vocab_size: int
    """One more than the largest token id."""
    digest: str
    separator: str
    """What follows each document, in words."""
    dtype: np.dtype
    """uint8 for bytes (each stands for one byte of text), otherwise TOKEN_RECORD."""

    def encode(self, raw: bytes) -> np.ndarray:
        """Records [tokens] of the document and its separator; UnicodeDecodeError if not text."""
        ...


class ByteTokenizer:
    """Each byte of UTF-8 is a token; documents end with byte 0, which text seldom contains."""

    name = "bytes"
    vocab_size = 256
    digest = "bytes"
    separator = "byte 0"
    dtype = np.dtype(np.uint8)

    def encode(self, raw: bytes) -> np.ndarray:
        """Records [bytes + 1], uint8."""
        raw.decode("utf-8")
        return np.frombuffer(raw + b"\0", dtype=np.uint8)


class HuggingFaceTokenizer:
    """A tokenizer.json; documents end with its end-of-text token, or else with a newline."""

    dtype = TOKEN_RECORD

    def __init__(self, path: Path) -> None:
        """Read `path`; InputError if it is not a tokenizer, or the extra is not installed."""
        try:
            import tokenizers  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise InputError(
                f"data.tokenizer = {str(path)!r} needs the package tokenizers",
                hint="pip install interlace[tokenizers], or set data.tokenizer to bytes",
            ) from error
        try:
            self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise InputError(
                f"data.tokenizer = {str(path)!r} is not a tokenizer: {error}",
                hint="set data.tokenizer to the tokenizer.json of a model, or to bytes",
            ) from error
        # A tokenizer.json may carry the truncation length of the model that it came with.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = str(path)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._separator_tokens, self.separator = self._find_separator(vocabulary)

    def encode(self, raw: bytes) -> np.ndarray:
        """TOKEN_RECORDs [tokens]; their bytes add up to the document's and the separator's."""
        encoding = self._encode(raw.decode("utf-8"))
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        # Normalizers may drop characters: what no token covers goes to the token before it,
        # so that each byte belongs to exactly one token.
        starts = np.maximum.accumulate(_character_starts(raw)[starts])
        starts[:1] = 0
        records = np.zeros(len(starts) + len(self._separator_tokens), dtype=TOKEN_RECORD)
        records["token"][: len(starts)] = encoding.ids
        records["bytes"][: len(starts)] = np.diff(starts, append=len(raw))
        records["token"][len(starts) :] = self._separator_tokens
        records["bytes"][len(starts) : len(starts) + 1] = 1
        return records

    def _encode(self, text: str) -> Any:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the package raises bare Exception
            raise InputError(
                f"the tokenizer {self.name} cannot encode this text: {error}",
                hint="use a tokenizer that knows an unknown token, or set data.tokenizer to bytes",
            ) from error

    def _find_separator(self, vocabulary: dict[str, int]) -> tuple[list[int], str]:
        for name in END_OF_TEXT:
            if name in vocabulary:
                return [vocabulary[name]], name
        newline = self._encode("\n").ids
        return newline, "newline" if newline else "nothing"


def _character_starts(raw: bytes) -> np.ndarray:
    """Where each character of UTF-8 text starts, and its end, int64 [characters + 1]."""
    values = np.frombuffer(raw, dtype=np.uint8)
    starts = np.flatnonzero((values & CONTINUATION_MASK) != CONTINUATION_BYTE)
    return np.append(starts, len(raw))


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names; InputError if there is none."""
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(name).expanduser()
    if not path.is_file():
        raise InputError(
            f"data.tokenizer = {name!r} is neither `bytes` nor a file",
            hint=nearest(name, ["bytes"]) + " (or give the path of a tokenizer.json)",
        )
    return HuggingFaceTokenizer(path)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files that are read as one stream of tokens, in this order."""

    files: Sequence[Path]
    tokenizer: Tokenizer
    field: str = "text"
    """Where a line of a .jsonl file has its text."""
    vocab_size: int = 0
    """Of the model, or 0: bounds the ids of files that hold ids, where no tokenizer does."""

    @property
    def dtype(self) -> np.dtype:
        """The tokenizer's records, or ids alone as soon as one file holds ids."""
        if not any(holds_ids(path) for path in self.files):
            return self.tokenizer.dtype
        return np.dtype("<u2" if 0 < self.id_limit <= 1 << 16 else "<u4")

    @property
    def id_limit(self) -> int:
        """One more than the largest id there may be; 0 where nothing says.

        `bytes`, the default tokenizer, tells nothing about files of which none holds text.
        """
        if isinstance(self.tokenizer, ByteTokenizer) and all(map(holds_ids, self.files)):
            return self.vocab_size
        return self.tokenizer.vocab_size

    def key(self) -> str:
        """Changes with everything that the tokens depend on: name of the token file."""
        facts = f"{FORMAT} {self.tokenizer.digest} {self.field} {self.id_limit}"
        digest = hashlib.sha256(facts.encode())
        for path in self.files:
            beside = [file for file in companions(path) if file.exists()]
            for part in (path, *beside):
                about = part.stat()
                digest.update(f"\n{part.resolve()}\0{about.st_size} {about.st_mtime_ns}".encode())
        return digest.hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class TokenHeader:
    """What the first HEADER_BYTES of a token file say about the rest."""

    digest: str
    """SHA-256 of all records: two machines with equal digests hold equal tokens."""
    records: int
    documents: int
    skipped: int
    """Files that are not UTF-8 text."""
    empty: int
    """Documents without text."""
    text_bytes: int
    """Size of the documents that were text, separators not counted."""
    largest_id: int


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """An opened token file. `records` is read from disk as it is used."""

    header: TokenHeader
    records: np.ndarray
    vocab_size: int
    """One more than the largest id that there may be, or that there is where nothing says."""
    note: str = ""
    """What had to be repaired, if anything."""


def token_ids(records: np.ndarray) -> np.ndarray:
    """The ids alone of records of any kind; a view."""
    return records["token"] if records.dtype.names else records


def open_tokens(corpus: Corpus, cache_dir: Path) -> TokenFile:
    """Tokens of `corpus`, from the cache if it has them, otherwise written to it.

    Several processes may do this at once: each writes a file of its own, the last one stays.
    InputError names the file, and the place in it, that cannot be used.
    """
    path = cache_dir / f"{corpus.key()}.tokens"
    damage = ""
    if path.exists():
        found = _map(path, corpus)
        if isinstance(found, TokenFile):
            return found
        damage = f"the token cache was damaged ({found}) and has been rebuilt"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=cache_dir, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                _write(file, corpus)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot write the token cache in {cache_dir}: {error.strerror}",
            hint="free some space, or choose another cache folder",
        ) from error
    opened = _map(path, corpus)
    if not isinstance(opened, TokenFile):
        raise RunError(f"the token cache {path} cannot be read back: {opened}")
    return replace(opened, note=damage)


def _write(file: IO[bytes], corpus: Corpus) -> None:
    """Header and records; one document or chunk of ids at a time is held in memory."""
    digest = hashlib.sha256()
    totals = dict.fromkeys(("documents", "skipped", "empty", "text_bytes"), 0)
    records, largest_id = 0, -1
    file.write(bytes(HEADER_BYTES))
    for part in _parts(corpus, totals):
        data = part.tobytes()
        file.write(data)
        digest.update(data)
        records += len(part)
        largest_id = max(largest_id, int(token_ids(part).max(initial=0)))
    header = TokenHeader(
        digest=digest.hexdigest(), records=records, largest_id=largest_id, **totals
    )
    file.seek(0)
    file.write(json.dumps(asdict(header)).encode().ljust(HEADER_BYTES))


def _parts(corpus: Corpus, totals: dict[str, int]) -> Iterator[np.ndarray]:
    """Records of `corpus.dtype` in order; what they came from is added to `totals`."""
    dtype, limit = corpus.dtype, corpus.id_limit
    for path in corpus.files:
        if holds_ids(path):
            opened = open_ids(path)
            totals["documents"] += opened.documents
            for chunk in opened.chunks(limit):
                yield chunk.astype(dtype)
            continue
        for raw in read_texts(path, corpus.field):
            if not raw:
                totals["empty"] += 1
                continue
            try:
                encoded = corpus.tokenizer.encode(raw)
            except UnicodeDecodeError:
                totals["skipped"] += 1
                continue
            totals["documents"] += 1
            totals["text_bytes"] += len(raw)
            yield encoded if encoded.dtype == dtype else token_ids(encoded).astype(dtype)


def _map(path: Path, corpus: Corpus) -> TokenFile | str:
    """The token file, or what is wrong with it. Reads it whole once, about 1 s per GB."""
    dtype = corpus.dtype
    try:
        with path.open("rb") as file:
            header = TokenHeader(**json.loads(file.read(HEADER_BYTES)))
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != HEADER_BYTES + header.records * dtype.itemsize:
                return f"{size_bytes} bytes long"
            if hashlib.file_digest(file, "sha256").hexdigest() != header.digest:
                return "checksum differs"
            records = np.empty(0, dtype)
            if header.records:
                records = np.memmap(file, dtype=dtype, mode="r", offset=HEADER_BYTES)
            vocab_size = corpus.id_limit or header.largest_id + 1
            return TokenFile(header=header, records=records, vocab_size=vocab_size)
    except (OSError, TypeError, ValueError) as error:
        return f"unreadable: {error}"
