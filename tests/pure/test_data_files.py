"""Data files: JSON lines and token ids become the documents they hold, or errors say where."""

import gzip
import json
import struct
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.config import DataConfig
from interlace.data.batches import Dataset, open_dataset
from interlace.data.documents import CHUNK_TOKENS, open_ids, read_texts
from interlace.data.tokens import Corpus, TokenFile, open_tokenizer, open_tokens
from interlace.errors import InputError

WORDS = [f"document {number}: caf\u00e9 \U0001f600" for number in range(60)]
IDS = np.arange(5000) * 7 % 911


def open_data(path: Path, cache_dir: Path, vocab_size: int = 0, **config: object) -> Dataset:
    kind = {"sequence_length": 16, "held_out": 0.1, **config}
    return open_dataset(
        DataConfig(path=str(path), **kind), seed=1, cache_dir=cache_dir, vocab_size=vocab_size
    )


def tokens_of(path: Path, vocab_size: int = 0) -> TokenFile:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    corpus = Corpus(files=files, tokenizer=open_tokenizer("bytes"), vocab_size=vocab_size)
    return open_tokens(corpus, path.parent / "cache")


def write_lines(path: Path, texts: Iterable[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts))
    return path


def write_bin(path: Path, ids: np.ndarray, dtype: str = "uint16", **facts: object) -> Path:
    path.write_bytes(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    Path(f"{path}.json").write_text(json.dumps({"dtype": dtype, **facts}))
    return path


def write_megatron(path: Path, documents: list[np.ndarray], code: int, dtype: str) -> Path:
    """NAME.bin and NAME.idx, written from the published layout."""
    lengths = np.array([len(ids) for ids in documents], dtype="<i4")
    offsets = np.cumsum([0, *lengths[:-1]]).astype("<i8") * np.dtype(dtype).itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    ends = np.arange(len(lengths) + 1, dtype="<i8")
    path.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + offsets.tobytes() + ends.tobytes()
    )
    path.write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    return path


@settings(deadline=None, max_examples=50)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=8))
def test_json_lines_give_back_any_text(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Line separators, quotes and all of Unicode survive, escaped or not, gzipped or not."""
    folder = tmp_path_factory.mktemp("lines")
    escaped = write_lines(folder / "a.jsonl", texts)
    plain = "\n \n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(plain.encode()))
    for path in (escaped, folder / "b.jsonl.gz"):
        assert [raw.decode() for raw in read_texts(path, "text")] == texts


def test_each_line_is_a_document_with_its_separator(tmp_path: Path) -> None:
    """Lines are packed in order, each followed by byte 0; empty ones are counted and said."""
    path = write_lines(tmp_path / "a.jsonl", ["", *WORDS, ""], field="content")
    corpus = Corpus(files=[path], tokenizer=open_tokenizer("bytes"), field="content")
    tokens = open_tokens(corpus, tmp_path / "cache")
    assert bytes(tokens.records) == b"".join(word.encode() + b"\0" for word in WORDS)
    dataset = open_data(path, tmp_path / "cache", field="content")
    assert "60 documents" in dataset.summary
    assert "2 documents skipped: empty" in dataset.summary
    assert dataset.held_out_bytes_per_token == 1.0


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        (b'{"text": "a"', r"lines\.jsonl, line 3 is not JSON", "repair or remove"),
        (b'{"text": "\xff"}', "line 3 is not JSON: 'utf-8'", "UTF-8"),
        (b"[" * 100_000, "line 3 is not JSON", "repair"),
        (b'["text"]', "line 3 holds a list and not an object", '{"text": "..."}'),
        (b'{"texts": "a"}', "line 3 has no field 'text'", "'texts'"),
        (b"{}", "line 3 has no field 'text'", "remove that line"),
        (b'{"text": null}', "line 3: 'text' is null and not a string", "data.field"),
        (b'{"text": 3}', "'text' is a number", "data.field"),
        (b'{"text": "\\ud83d"}', "line 3: 'text' holds half of a surrogate pair", "U\\+FFFF"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str, hint: str) -> None:
    """Each way in which a line can be wrong gives file, line and what to do, and no cache."""
    path = write_lines(tmp_path / "lines.jsonl", WORDS[:2])
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(InputError, match=message) as caught:
        open_data(path, tmp_path / "cache")
    assert hint.replace("\\", "") in caught.value.hint
    assert not list((tmp_path / "cache").iterdir())


def test_kinds_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """Data in a known format that nothing here reads is never passed over."""
    for name in ("a.parquet", "a.npz", "a.jsonl.zst"):
        (tmp_path / "data").mkdir(exist_ok=True)
        write_lines(tmp_path / "data" / "b.jsonl", WORDS)
        path = tmp_path / "data" / name
        path.write_bytes(b"PAR1")
        with pytest.raises(InputError, match=name) as caught:
            open_data(tmp_path / "data", tmp_path / "cache")
        assert ".jsonl" in caught.value.hint
        path.unlink()


def test_truncated_gzip_is_named(tmp_path: Path) -> None:
    """An archive that was cut short, or is none, is an InputError with its name."""
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b'{"text": "some words"}\n' * 1000)
    for damaged in (whole[:-20], whole[:40] + b"\xff" * 30, b'{"text": "a"}\n'):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"cannot read .*a\.jsonl\.gz"):
            open_data(path, tmp_path / "cache")


def test_json_lines_are_streamed(tmp_path: Path) -> None:
    """32 MB of lines are tokenised within a few MB."""
    path = write_lines(tmp_path / "a.jsonl", (f"{number:0999}" for number in range(32_000)))
    tracemalloc.start()
    tokens = tokens_of(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tokens.header.records == 32_000_000
    assert peak_bytes < 4e6


@settings(deadline=None, max_examples=40)
@given(
    ids=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=50),
    kind=st.sampled_from(["<i4", ">i4", "<u2", ">u2", "<i8", "uint32", "uint64"]),
)
def test_ids_survive_every_format(
    ids: list[int], kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """.npy of any integer type and byte order, .bin of both types, and Megatron's."""
    folder = tmp_path_factory.mktemp("ids")
    values = np.array(ids)
    np.save(folder / "a.npy", values.astype(kind))
    written = [folder / "a.npy", write_bin(folder / "b.bin", values)]
    written.append(write_bin(folder / "c.bin", values, "uint32", tokens=len(ids)))
    written.append(write_megatron(folder / "d.bin", [values, values[:3]], 4, "<i4"))
    for path in written:
        found = np.concatenate(list(open_ids(path).chunks(0)))
        assert found.tolist() == (ids + ids[:3] if path.name == "d.bin" else ids)
    assert open_ids(folder / "d.bin").documents == 2


@pytest.mark.parametrize("vocab_size", [0, 911, 70_000])
def test_vocabulary_of_ids_is_the_models_or_the_largest(tmp_path: Path, vocab_size: int) -> None:
    """Without model.vocab_size it is the largest id + 1; bits per byte are not known."""
    path = tmp_path / "ids.npy"
    np.save(path, IDS)
    dataset = open_data(path, tmp_path / "cache", vocab_size)
    assert dataset.vocab_size == (vocab_size or 911)
    assert dataset.held_out_bytes_per_token is None
    assert "1 documents, 5,000 tokens (ids as they are" in dataset.summary
    batch = next(dataset.batches(2))
    assert ((batch[0] + 7) % 911).tolist() == batch[1].tolist()
    stream = tokens_of(path, vocab_size).records
    assert stream.dtype == (np.uint16 if vocab_size == 911 else np.uint32)
    assert stream.tolist() == IDS.tolist()


def test_mixed_folder_is_read_by_suffix_in_name_order(tmp_path: Path) -> None:
    """Text is tokenised, ids are taken as they are, and what describes ids is not text."""
    root = tmp_path / "data"
    root.mkdir()
    (root / "a.txt").write_text("abc")
    write_bin(root / "b.bin", np.array([9, 8, 7]))
    write_lines(root / "c.jsonl", ["d", "e"])
    write_megatron(root / "d.bin", [np.array([5]), np.array([6, 7])], 8, "<u2")
    np.save(root / "e.npy", np.full(300, 255))
    dataset = open_data(root, tmp_path / "cache", sequence_length=4)
    assert "7 documents, 5 bytes of text, 314 tokens (bytes, vocabulary 256" in dataset.summary
    (cached,) = (tmp_path / "cache").glob("*.tokens")
    files = [root / name for name in ("a.txt", "b.bin", "c.jsonl", "d.bin", "e.npy")]
    corpus = Corpus(files=files, tokenizer=open_tokenizer("bytes"))
    opened = open_tokens(corpus, tmp_path / "cache")
    assert cached.name == f"{corpus.key()}.tokens"
    assert opened.records.tolist() == [*b"abc\0", 9, 8, 7, *b"d\0e\0", 5, 6, 7, *[255] * 300]
    assert dataset.held_out_bytes_per_token is None


def test_ids_outside_the_vocabulary_are_named_with_their_place(tmp_path: Path) -> None:
    """File and index of the first wrong id, beyond the first chunk too; a bound set later is
    checked although the tokens are in the cache."""
    ids = np.zeros(CHUNK_TOKENS + 10, dtype=np.int32)
    ids[-1] = 300
    path = tmp_path / "ids.npy"
    np.save(path, ids)
    assert tokens_of(path).vocab_size == 301
    with pytest.raises(InputError, match=rf"ids\.npy.*index {len(ids) - 1:,} .* is 300,") as caught:
        tokens_of(path, 300)
    assert "model.vocab_size" in caught.value.hint
    ids[5] = -1
    np.save(path, ids)
    with pytest.raises(InputError, match=r"index 5 \(from 0\) is -1"):
        tokens_of(path)
    (tmp_path / "text.txt").write_text("so that the tokenizer counts")
    with pytest.raises(InputError, match="ids are 0 to 255"):
        open_data(tmp_path, tmp_path / "cache")
    wrong_type = write_bin(tmp_path / "b.bin", IDS)
    Path(f"{wrong_type}.json").write_text('{"dtype": "uint32"}')
    with pytest.raises(InputError, match=r"b\.bin: the id") as caught:
        tokens_of(wrong_type)
    assert "check the type of the ids" in caught.value.hint


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), dtype=np.int64), r"int64 of shape \[2, 3\]"),
        (np.zeros(3), "float64"),
        (np.zeros(3, dtype=bool), "bool"),
        (np.zeros(0, dtype=np.int64), "no token ids"),
        (np.array([{}], dtype=object), "not a whole .npy array"),
    ],
)
def test_arrays_that_are_no_ids_are_refused(
    array: np.ndarray, message: str, tmp_path: Path
) -> None:
    """Type, dimensions and emptiness are checked, and pickled objects are never loaded."""
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(InputError, match=message) as caught:
        open_ids(tmp_path / "a.npy")
    assert str(tmp_path / "a.npy") in caught.value.message


def test_cut_files_are_refused(tmp_path: Path) -> None:
    """A .npy, a .bin at any byte, its note and a Megatron index, each cut short or foreign."""
    np.save(tmp_path / "a.npy", IDS)
    noted = write_bin(tmp_path / "b.bin", IDS, tokens=len(IDS))
    unnoted = write_bin(tmp_path / "c.bin", IDS)
    pair = write_megatron(tmp_path / "d.bin", [IDS], 8, "<u2")
    index = pair.with_suffix(".idx")
    cases = [
        (tmp_path / "a.npy", tmp_path / "a.npy", -8, "not a whole .npy array"),
        (tmp_path / "a.npy", tmp_path / "a.npy", 6, "not a whole .npy array"),
        (noted, noted, -2, r"4,999 ids of type uint16 and 0 bytes over; b\.bin\.json says 5,000"),
        (unnoted, unnoted, -1, "4,999 ids of type uint16 and 1 bytes over"),
        (unnoted, unnoted, 0, "holds no token ids"),
        (pair, pair, -2, r"d\.idx says 5,000"),
        (pair, index, -1, "not a whole Megatron index"),
        (pair, index, 20, "not a whole Megatron index"),
    ]
    for path, cut, size, message in cases:
        whole = cut.read_bytes()
        cut.write_bytes(whole[:size])
        with pytest.raises(InputError, match=message):
            open_ids(path)
        cut.write_bytes(whole)
        assert len(open_ids(path).ids) == 5000


@pytest.mark.parametrize(
    ("note", "message"),
    [
        (None, "nothing says of which type"),
        ("{", "not an object with `dtype`"),
        ("[]", "not an object with `dtype`"),
        ('{"type": "uint16"}', "not an object with `dtype`"),
        ('{"dtype": "float32"}', "says dtype = 'float32'"),
        ('{"dtype": ["uint16"]}', r"says dtype = \['uint16'\]"),
        ('{"dtype": "uint16", "tokens": "many"}', "tokens = 'many'"),
    ],
)
def test_type_of_a_bin_is_never_guessed(note: str | None, message: str, tmp_path: Path) -> None:
    """No note, or one that does not say it, is an error that shows what to write."""
    path = write_bin(tmp_path / "a.bin", IDS)
    beside = tmp_path / "a.bin.json"
    beside.unlink() if note is None else beside.write_text(note)
    with pytest.raises(InputError, match=message) as caught:
        open_data(path, tmp_path / "cache")
    assert "uint16" in caught.value.hint


def test_cache_follows_note_field_and_bound(tmp_path: Path) -> None:
    """What changes the tokens changes the name of the token file."""
    path = write_bin(tmp_path / "a.bin", np.tile([1, 0], 500))
    text = write_lines(tmp_path / "b.jsonl", WORDS)
    tokenizer = open_tokenizer("bytes")
    keys = [Corpus(files=[path], tokenizer=tokenizer).key()]
    keys.append(Corpus(files=[path], tokenizer=tokenizer, vocab_size=9).key())
    keys.append(Corpus(files=[text], tokenizer=tokenizer).key())
    keys.append(Corpus(files=[text], tokenizer=tokenizer, field="body").key())
    assert tokens_of(path).records.tolist() == [1, 0] * 500
    Path(f"{path}.json").write_text('{"dtype": "uint32"}')
    keys.append(Corpus(files=[path], tokenizer=tokenizer).key())
    assert tokens_of(path).records.tolist() == [1] * 500
    assert len(set(keys)) == 5
