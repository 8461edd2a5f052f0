"""Data: which text is read, that held-out text is never trained on, and that resuming is exact."""

import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.config import DataConfig
from interlace.data.batches import Dataset, find_files, held_out_mask, open_dataset
from interlace.data.tokens import (
    HEADER_BYTES,
    ByteTokenizer,
    Corpus,
    TokenFile,
    TokenHeader,
    open_tokenizer,
    open_tokens,
)
from interlace.errors import InputError, RunError

TEXT = "".join(f"line {number}: some words, a caf\u00e9 and \U0001f600\n" for number in range(400))


def counting_dataset(
    tokens: int, *, sequence_length: int = 4, held_out: float = 0.1, seed: int = 1
) -> Dataset:
    """A dataset in which token i has the value i, so that a batch tells where it came from."""
    header = TokenHeader(
        digest="d",
        records=tokens,
        documents=1,
        skipped=0,
        empty=0,
        text_bytes=tokens,
        largest_id=tokens - 1,
    )
    records = np.arange(tokens, dtype=np.uint32)
    return Dataset(
        DataConfig(sequence_length=sequence_length, held_out=held_out),
        tokens=TokenFile(header=header, records=records, vocab_size=tokens),
        tokenizer=ByteTokenizer(),
        seed=seed,
    )


def open_text(path: Path, cache_dir: Path, **config: object) -> Dataset:
    settings_ = {"sequence_length": 16, "held_out": 0.1, **config}
    return open_dataset(DataConfig(path=str(path), **settings_), seed=1, cache_dir=cache_dir)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def tokens_of(batch: tuple[torch.Tensor, torch.Tensor]) -> set[int]:
    return set(torch.cat(batch, dim=1).flatten().tolist())


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(20, 3000),
    fraction=st.floats(0.06, 0.9),
    length=st.integers(1, 9),
    seed=st.integers(0, 2**40),
)
def test_no_held_out_token_is_ever_trained_on(
    samples: int, fraction: float, length: int, seed: int
) -> None:
    """Over a whole pass, training and held-out windows share no position of the text."""
    dataset = counting_dataset(
        samples * (length + 1), sequence_length=length, held_out=fraction, seed=seed
    )
    trained = tokens_of(next(dataset.batches(dataset.train_samples)))
    held_out = tokens_of(dataset.held_out(dataset.held_out_samples, 1)[0])
    assert not trained & held_out
    assert len(trained) + len(held_out) == samples * (length + 1)
    assert dataset.held_out_samples == pytest.approx(samples * fraction, abs=0.15 * samples + 1)


def test_split_ignores_the_seed_and_is_spread_over_the_text() -> None:
    """The same samples are held out under every seed, from all parts of the text."""
    first = counting_dataset(50_000, held_out=0.02, seed=1)
    second = counting_dataset(50_000, held_out=0.02, seed=2)
    taken = [torch.stack([batch[0] for batch in data.held_out(2, 8)]) for data in (first, second)]
    assert torch.equal(*taken)
    assert not torch.equal(next(first.batches(8))[0], next(second.batches(8))[0])
    starts = np.flatnonzero(held_out_mask(10_000, 0.02)) / 10_000
    assert np.histogram(starts, bins=4, range=(0, 1))[0].min() > 0
    assert len(starts) == pytest.approx(200, abs=64)


def test_targets_are_the_next_tokens_and_a_pass_takes_each_sample_once() -> None:
    """Shapes and types of a batch; a pass is a permutation that the next pass does not repeat."""
    dataset = counting_dataset(500)
    tokens, targets = next(dataset.batches(3))
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == targets.shape == (3, 4)
    assert torch.equal(targets, tokens + 1)
    stream = dataset.batches(dataset.train_samples)
    first, second = next(stream)[0][:, 0], next(stream)[0][:, 0]
    assert sorted(first.tolist()) == sorted(second.tolist())
    assert len(set(first.tolist())) == dataset.train_samples
    assert first.tolist() != second.tolist()


@settings(deadline=None, max_examples=40)
@given(
    samples=st.integers(20, 60),
    micro_batch=st.integers(1, 7),
    count=st.integers(1, 30),
    shards=st.integers(1, 3),
)
def test_resuming_gives_the_same_batches(
    samples: int, micro_batch: int, count: int, shards: int
) -> None:
    """2N batches equal N, a state through JSON into a fresh stream, and N more, over passes."""
    dataset = counting_dataset(samples * 5)
    kind = {"shard": shards - 1, "num_shards": shards}
    whole = dataset.batches(micro_batch, **kind)
    expected = [next(whole)[0] for _ in range(2 * count)]
    before = dataset.batches(micro_batch, **kind)
    got = [next(before)[0] for _ in range(count)]
    after = counting_dataset(samples * 5).batches(micro_batch, **kind)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    got += [next(after)[0] for _ in range(count)]
    assert torch.equal(torch.stack(got), torch.stack(expected))


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(20, 80),
    micro_batch=st.integers(1, 5),
    shards=st.integers(1, 8),
    position=st.integers(0, 200),
)
def test_shards_are_disjoint_and_together_are_the_whole_stream(
    samples: int, micro_batch: int, shards: int, position: int
) -> None:
    """For any number of shards, from any position and over passes: the shares of a round, joined,
    are the next samples of the stream that one reader takes one by one."""
    dataset = counting_dataset(samples * 5)
    parts = [
        dataset.batches(micro_batch, position, shard=shard, num_shards=shards)
        for shard in range(shards)
    ]
    alone = dataset.batches(1, position)
    for _ in range(1 + 2 * samples // (micro_batch * shards)):
        joined = torch.cat([next(part)[0] for part in parts])
        assert joined.tolist() == [next(alone)[0][0].tolist() for _ in joined]
        assert {part.position for part in parts} == {alone.position}


@pytest.mark.parametrize(("shards", "micro_batches"), [(1, 12), (2, 6), (3, 4), (12, 1)])
def test_a_step_takes_the_same_samples_however_many_ranks_share_it(
    shards: int, micro_batches: int
) -> None:
    """A step of 12 micro-batches in all is the same set of samples on 1, 2, 3 and 12 shards, so
    that a run can go on with another number of data-parallel ranks."""
    dataset = counting_dataset(2000)
    whole = next(dataset.batches(24, 48))[0]
    parts = [dataset.batches(2, 48, shard=shard, num_shards=shards) for shard in range(shards)]
    taken = [next(part)[0] for part in parts for _ in range(micro_batches)]
    assert sorted(torch.cat(taken)[:, 0].tolist()) == sorted(whole[:, 0].tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "x"}, "other data"),
        ({"seed": 9}, r"train\.seed = 9"),
        ({"position": -1}, "position"),
        ({"position": None}, "position"),
    ],
)
def test_resuming_on_something_else_is_refused(change: dict[str, object], message: str) -> None:
    """A state of other data, another seed or no position at all does not load."""
    stream = counting_dataset(500).batches(2)
    next(stream)
    with pytest.raises(InputError, match=message):
        stream.load_state_dict({**stream.state_dict(), **change})
    assert stream.position == 2


def test_digest_follows_text_and_split_and_not_the_place(text: Path, tmp_path: Path) -> None:
    """The digest that ranks compare is about content: a moved file keeps it."""
    moved = tmp_path / "moved.txt"
    moved.write_bytes(text.read_bytes())
    base = open_text(text, tmp_path / "cache").digest
    assert open_text(moved, tmp_path / "cache").digest == base
    assert open_text(text, tmp_path / "cache", sequence_length=8).digest != base
    assert open_text(text, tmp_path / "cache", held_out=0.2).digest != base
    moved.write_text(TEXT + "more")
    assert open_text(moved, tmp_path / "cache").digest != base


def test_standard_library_is_plain_python_without_tests(tmp_path: Path) -> None:
    """`stdlib` is several MB of source, sorted, of which no file is a test or a package."""
    files = find_files("stdlib")
    names = [file.as_posix() for file in files]
    assert files == find_files("stdlib")
    assert all(file.suffix == ".py" for file in files)
    assert not [name for name in names if "/site-packages/" in name or "/test/" in name]
    assert any(name.endswith("/json/decoder.py") for name in names)
    dataset = open_dataset(DataConfig(), seed=1, cache_dir=tmp_path, divisor=3)
    assert dataset.vocab_size == 258
    assert dataset.train_samples * 257 > 5e6
    assert next(dataset.batches(4))[0].max() < 256


def test_folder_is_read_in_name_order_and_skips_are_counted(tmp_path: Path) -> None:
    """Files of all depths, sorted; hidden ones left out; what is not UTF-8 is skipped, and said."""
    root = tmp_path / "texts"
    for name in ("b.txt", "a/z.txt", ".git/config", ".hidden"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name} " * 100)
    (root / "image.png").write_bytes(b"\x89PNG\xff" * 100)
    (root / "empty.txt").touch()
    texts = ["z.txt", "b.txt", "empty.txt"]
    assert [file.name for file in find_files(str(root))] == [*texts, "image.png"]
    assert [file.name for file in find_files(f"{root}/**/*.txt")] == texts
    dataset = open_text(root, tmp_path / "cache")
    assert "2 documents" in dataset.summary
    assert "1 documents skipped: empty" in dataset.summary
    assert "1 files skipped: not UTF-8 text" in dataset.summary
    corpus = Corpus(files=find_files(str(root)), tokenizer=ByteTokenizer())
    tokens = open_tokens(corpus, tmp_path / "cache").records
    assert bytes(tokens) == b"a/z.txt " * 100 + b"\0" + b"b.txt " * 100 + b"\0"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", "cannot read .*missing.txt"),
        ("no/such/*.txt", "matches no regular file"),
        ("linked", "cannot read linked/gone.txt"),
        ("folder", "matches no regular file"),
        ("/dev/null", "matches no regular file"),
        ("empty.txt", "holds no text"),
        ("binary.dat", "holds no text: 1 files, 1 of them not UTF-8"),
        ("short.txt", "each must be at least one"),
        ("dangling.txt", "cannot read .*dangling.txt"),
        ("/proc/self/mem", "cannot read /proc/self/mem"),
    ],
)
def test_bad_paths_are_named(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way in which a path can be wrong is an InputError with a hint, and no cache is left."""
    if path.startswith("/proc") and not Path(path).exists():
        pytest.skip("needs /proc")
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("linked").mkdir()
    Path("linked/gone.txt").symlink_to("nowhere.txt")
    Path("empty.txt").touch()
    Path("binary.dat").write_bytes(b"\xff\xfe" * 50)
    Path("short.txt").write_text("twenty-five characters...")
    Path("dangling.txt").symlink_to("gone.txt")
    with pytest.raises(InputError, match=message) as caught:
        open_text(Path(path), tmp_path / "cache")
    assert "set data." in caught.value.hint
    assert not list(tmp_path.glob("cache/*.part"))


def test_empty_path_is_not_the_current_folder() -> None:
    """An empty string would otherwise mean every file from here on."""
    with pytest.raises(InputError, match=r"data\.path is empty"):
        find_files("")


def test_too_little_held_out_text_for_an_evaluation_is_refused() -> None:
    """Evaluation never counts a sample twice to fill its batches."""
    with pytest.raises(InputError, match="asks for 8 micro-batches of 4") as caught:
        counting_dataset(500).held_out(4, 8)
    assert "train.evaluate_batches" in caught.value.hint


def test_cache_is_used_and_damage_is_repaired(text: Path, tmp_path: Path) -> None:
    """A second start reads the file; truncation, a flipped bit and a torn header are rebuilt."""
    cache = tmp_path / "cache"
    original = open_text(text, cache)
    (path,) = cache.iterdir()
    whole, written = path.read_bytes(), path.stat().st_mtime_ns
    assert open_text(text, cache).summary == original.summary
    assert path.stat().st_mtime_ns == written
    flipped = bytearray(whole)
    flipped[HEADER_BYTES + 7] ^= 1
    for damaged in (whole[:-9], whole[:100], b"", bytes(flipped), b"[1]".ljust(HEADER_BYTES)):
        path.write_bytes(damaged)
        repaired = open_text(text, cache)
        assert "the token cache was damaged" in repaired.summary
        assert repaired.digest == original.digest
        assert path.read_bytes() == whole


def test_starting_at_once_is_safe(text: Path, tmp_path: Path) -> None:
    """Eight openers that find no cache all get the same tokens and leave one file."""
    barrier = threading.Barrier(8, timeout=30)
    digests = []

    def open_one() -> None:
        barrier.wait()
        digests.append(open_text(text, tmp_path / "cache").digest)

    threads = [threading.Thread(target=open_one, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(digests) == 8
    assert len(set(digests)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_cache_that_cannot_be_written_is_named(text: Path) -> None:
    """The cache folder is a file: RunError with the path."""
    with pytest.raises(RunError, match=r"token cache in .*text\.txt"):
        open_text(text, text)


def save_tokenizer(path: Path, *, end_of_text: bool = True) -> Path:
    """A byte-level BPE of 300 tokens with a truncation length left in its file."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.ByteLevelBPETokenizer()
    special = ["<|endoftext|>"] if end_of_text else []
    model.train_from_iterator([TEXT], vocab_size=300, special_tokens=special, show_progress=False)
    model.enable_truncation(8)
    model.save(str(path))
    return path


@pytest.mark.parametrize("end_of_text", [True, False])
def test_tokenizer_file_accounts_for_every_byte(
    end_of_text: bool, text: Path, tmp_path: Path
) -> None:
    """Tokens decode to the text, untruncated, and their bytes add up to its size and separator."""
    path = save_tokenizer(tmp_path / "tokenizer.json", end_of_text=end_of_text)
    tokenizer = open_tokenizer(str(path))
    records = tokenizer.encode(text.read_bytes())
    assert records["bytes"].sum() == len(text.read_bytes()) + 1
    assert tokenizer.separator == ("<|endoftext|>" if end_of_text else "newline")
    decoder = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    assert decoder.decode(records["token"][:-1].tolist()) == TEXT
    dataset = open_text(text, tmp_path / "cache", tokenizer=str(path))
    assert dataset.vocab_size == tokenizer.vocab_size == decoder.get_vocab_size()
    assert 1 < dataset.held_out_bytes_per_token < 20
    assert dataset.digest != open_text(text, tmp_path / "cache").digest


def test_bytes_per_token_counts_the_predicted_tokens_of_the_held_out_split(
    text: Path, tmp_path: Path
) -> None:
    """The first token of a window is never predicted, so its bytes are not counted."""
    path = save_tokenizer(tmp_path / "tokenizer.json")
    dataset = open_text(text, tmp_path / "cache", tokenizer=str(path))
    records = open_tokenizer(str(path)).encode(text.read_bytes())
    windows = records[: len(records) // 17 * 17].reshape(-1, 17)
    held_out = windows[held_out_mask(len(windows), 0.1)]
    (_, targets) = dataset.held_out(dataset.held_out_samples, 1)[0]
    assert targets.tolist() == held_out["token"][:, 1:].tolist()
    assert dataset.held_out_bytes_per_token == held_out["bytes"][:, 1:].mean()
    assert open_text(text, tmp_path / "cache").held_out_bytes_per_token == 1.0


def test_wrong_tokenizers_are_named(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typo, a file that is no tokenizer, and a package that is not installed."""
    with pytest.raises(InputError, match="neither `bytes` nor a file") as caught:
        open_text(text, tmp_path / "cache", tokenizer="byte")
    assert "'bytes'" in caught.value.hint
    path = save_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match="is not a tokenizer"):
        open_text(text, tmp_path / "cache", tokenizer=str(text))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match="needs the package tokenizers") as caught:
        open_text(text, tmp_path / "cache", tokenizer=str(path))
    assert "pip install interlace[tokenizers]" in caught.value.hint
