"""Data files to batches: which files, which samples are held out, in which order.

A sample is `sequence_length + 1` tokens in a row; samples never overlap. Positions count samples
of the training stream, which is one shuffled pass over the training samples after the other.
"""

import glob
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from interlace.config import DataConfig
from interlace.data.documents import companions
from interlace.data.tokens import (
    Corpus,
    TokenFile,
    Tokenizer,
    open_tokenizer,
    open_tokens,
    token_ids,
)
from interlace.errors import InputError

TokenBatch = tuple[torch.Tensor, torch.Tensor]

STDLIB = "stdlib"
"""The word in `data.path` for the source text of Python's standard library."""
PATH_HINT = "set data.path to a file, a folder, a glob such as 'text/**/*.txt', or stdlib"
"""Hint where `data.path` names nothing that can be read."""
# Tests are left out because some distributions ship Python without them.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

# Held-out text comes in runs of up to BLOCK_SAMPLES samples, in at least MIN_BLOCKS places.
BLOCK_SAMPLES = 64
MIN_BLOCKS = 8
"""A choice: held-out text from fewer places would say more of these than of the data."""


def open_dataset(
    config: DataConfig, *, seed: int, cache_dir: Path, divisor: int = 1, vocab_size: int = 0
) -> "Dataset":
    """Find, tokenise (once, into `cache_dir`) and split the text.

    `divisor` is the number of ranks that share the vocabulary: `Dataset.vocab_size` is rounded up
    to a multiple of it. `vocab_size` is `model.vocab_size`: token ids that were made elsewhere must
    be below it, unless 0. InputError if the text is missing, unreadable or too short.
    """
    files = find_files(config.path)
    tokenizer = open_tokenizer(config.tokenizer)
    corpus = Corpus(files=files, tokenizer=tokenizer, field=config.field, vocab_size=vocab_size)
    tokens = open_tokens(corpus, cache_dir)
    if not len(tokens.records):
        raise InputError(
            f"data.path = {config.path!r} holds no text: {len(files)} files, "
            f"{tokens.header.skipped} of them not UTF-8",
            hint="set data.path to text, .jsonl, .npy or .bin files, or to stdlib",
        )
    return Dataset(config, tokens=tokens, tokenizer=tokenizer, seed=seed, divisor=divisor)


def find_files(path: str) -> list[Path]:
    """Regular files that `data.path` names, in an order that only their names decide.

    In a folder, hidden files and folders are left out, and links to folders are not followed. What
    only describes a .bin file of those found is left out too.
    """
    if not path:
        raise InputError("data.path is empty", hint=PATH_HINT)
    if path == STDLIB:
        root = sysconfig.get_path("stdlib")
        found = [file for file in _walk(Path(root), STDLIB_LEFT_OUT) if file.suffix == ".py"]
    elif (expanded := Path(path).expanduser()).is_dir():
        found = _walk(expanded, set())
    elif expanded.exists() or not glob.has_magic(path):
        found = [expanded]
    else:
        found = [Path(name) for name in sorted(glob.glob(str(expanded), recursive=True))]
    describing = {beside for file in found for beside in companions(file)}
    regular = [file for file in found if file not in describing and _is_regular(file, path)]
    if not regular:
        raise InputError(f"data.path = {path!r} matches no regular file", hint=PATH_HINT)
    return regular


def _walk(root: Path, left_out: set[str]) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise InputError(
            f"cannot read the folder {error.filename}: {error.strerror}",
            hint="make it readable, or set data.path to another folder",
        )

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name not in left_out]
        found += [Path(folder, name) for name in names if name[0] != "."]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _is_regular(file: Path, path: str) -> bool:
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except OSError as error:
        raise InputError(
            f"data.path = {path!r}: cannot read {file}: {error.strerror}",
            hint=PATH_HINT if str(file) == path else f"repair or remove it, or {PATH_HINT}",
        ) from error


def held_out_mask(total: int, fraction: float) -> np.ndarray:
    """Which of `total` samples are held out, bool [total]; the seed plays no part.

    Block b is held out where floor((b + 1) fraction) exceeds floor(b fraction): evenly spaced.
    """
    block = max(1, min(BLOCK_SAMPLES, int(total * fraction) // MIN_BLOCKS))
    edges = np.floor(np.arange(total // block + 2) * fraction)
    return np.repeat(edges[1:] > edges[:-1], block)[:total]


class Dataset:
    """Tokenised text, split into training and held-out samples."""

    def __init__(
        self,
        config: DataConfig,
        *,
        tokens: TokenFile,
        tokenizer: Tokenizer,
        seed: int,
        divisor: int = 1,
    ) -> None:
        self.seed = seed
        self.sequence_length = config.sequence_length
        self.vocab_size = -(-tokens.vocab_size // divisor) * divisor
        """Rows that the model's embedding needs."""
        width = config.sequence_length + 1
        total = len(tokens.records) // width
        held_out = held_out_mask(total, config.held_out)
        self._latest_order: tuple[int, np.ndarray] | None = None
        self._train = np.flatnonzero(~held_out)
        self._held_out = np.flatnonzero(held_out)
        if not len(self._train) or not len(self._held_out):
            raise InputError(
                f"data.path = {config.path!r} has {len(tokens.records):,} tokens, which are "
                f"{len(self._train)} training and {len(self._held_out)} held-out samples of "
                f"{width} tokens; each must be at least one",
                hint="give more text, set data.sequence_length lower, or data.held_out to "
                "about 0.1",
            )
        records = tokens.records[: total * width].reshape(total, width)
        self._windows = token_ids(records)
        self.held_out_bytes_per_token = _bytes_per_token(records, self._held_out)
        """Bytes of text that one predicted token of the held-out split stands for; None where
        token ids were made elsewhere, because their text is not known."""
        facts = f"{tokens.header.digest} {width} {config.held_out!r} {tokenizer.digest}"
        self.digest = hashlib.sha256(facts.encode()).hexdigest()
        """Equal on all ranks that hold the same tokens, split in the same way."""
        self.summary = self._describe(config, tokens, tokenizer)
        """Files, sizes and what was left out, in words."""

    @property
    def train_samples(self) -> int:
        """Samples in one pass over the training text."""
        return len(self._train)

    @property
    def held_out_samples(self) -> int:
        """Samples that are never trained on."""
        return len(self._held_out)

    def batches(
        self, micro_batch_size: int, position: int = 0, *, shard: int = 0, num_shards: int = 1
    ) -> "Batches":
        """Endless micro-batches from sample `position` of the training stream.

        Shards (data-parallel ranks) get disjoint shares; ranks that share a layer all take the
        same shard.
        """
        return Batches(
            self, micro_batch_size, position=position, shard=shard, num_shards=num_shards
        )

    def held_out(self, micro_batch_size: int, count: int) -> list[TokenBatch]:
        """`count` micro-batches, always the same ones, spread over the whole held-out split."""
        wanted = micro_batch_size * count
        if wanted > self.held_out_samples:
            raise InputError(
                f"evaluation asks for {count} micro-batches of {micro_batch_size}, and the "
                f"held-out text has {self.held_out_samples} samples",
                hint="set train.evaluate_batches lower, or data.held_out higher",
            )
        chosen = self._held_out[np.arange(wanted) * self.held_out_samples // wanted]
        return [self.take(part) for part in chosen.reshape(count, micro_batch_size)]

    def order(self, epoch: int) -> np.ndarray:
        """Sample numbers of one shuffled pass, int64 [train_samples]; the latest one is kept."""
        if self._latest_order is None or self._latest_order[0] != epoch:
            # Raw Philox output is the same in every numpy version; Generator.permutation need not
            # be.
            raw = np.random.Philox(np.random.SeedSequence([self.seed, epoch]))
            order = np.argsort(raw.random_raw(self.train_samples), kind="stable")
            self._latest_order = epoch, self._train[order]
        return self._latest_order[1]

    def take(self, samples: np.ndarray) -> TokenBatch:
        """Tokens and targets (the next tokens), each int64 [len(samples), sequence_length]."""
        windows = self._windows[samples].astype(np.int64)
        tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def _describe(self, config: DataConfig, tokens: TokenFile, tokenizer: Tokenizer) -> str:
        header = tokens.header
        text = f"{header.text_bytes:,} bytes of text, " if header.text_bytes else ""
        made = f"{tokenizer.name}, " if text else "ids as they are, "
        ends = f", {tokenizer.separator} after each text" if text else ""
        parts = [
            f"{config.path}: {header.documents:,} documents, {text}{header.records:,} tokens "
            f"({made}vocabulary {tokens.vocab_size:,}{ends})",
            f"{self.train_samples:,} training and {self.held_out_samples:,} held-out samples of "
            f"{self.sequence_length} tokens",
        ]
        if header.skipped:
            parts.append(f"{header.skipped:,} files skipped: not UTF-8 text")
        if header.empty:
            parts.append(f"{header.empty:,} documents skipped: empty")
        return "; ".join([*parts, tokens.note] if tokens.note else parts)


def _bytes_per_token(records: np.ndarray, samples: np.ndarray) -> float | None:
    """Over the targets of `samples`: the first token of a sample is never predicted."""
    if not records.dtype.names:
        return 1.0 if records.dtype == np.uint8 else None
    sizes_bytes = records["bytes"][samples][:, 1:]
    return float(sizes_bytes.sum(dtype=np.int64) / sizes_bytes.size)


class Batches(Iterator[TokenBatch]):
    """Micro-batches (tokens, targets), each int64 [micro_batch_size, sequence_length], endless.

    A pass may end inside a micro-batch, which then goes on with the next pass.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        *,
        position: int = 0,
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        assert micro_batch_size > 0
        assert position >= 0
        assert 0 <= shard < num_shards
        self.position = position
        """Samples of the training stream that all shards together have taken."""
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._shard = shard
        self._num_shards = num_shards
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __next__(self) -> TokenBatch:
        size = self._micro_batch_size
        first = self.position + self._shard * size
        samples = np.array([self._sample(place) for place in range(first, first + size)])
        self.position += size * self._num_shards
        return self._dataset.take(samples)

    def order_digest(self) -> str:
        """A hash of the pass from which the next sample comes. 1 s for 100 million samples."""
        order = self._dataset.order(self.position // self._dataset.train_samples)
        return hashlib.sha256(order.tobytes()).hexdigest()

    def _sample(self, place: int) -> int:
        epoch, index = divmod(place, self._dataset.train_samples)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._dataset.order(epoch)
        return int(self._order[index])

    def state_dict(self) -> dict[str, Any]:
        """Where to go on, and on which data; plain values."""
        return {
            "position": self.position,
            "digest": self._dataset.digest,
            "seed": self._dataset.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; InputError if that was another text, split or seed."""
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise InputError(
                f"the saved data position {position!r} is not a number of samples",
                hint="resume from a checkpoint that interlace wrote",
            )
        if state.get("digest") != self._dataset.digest:
            raise InputError(
                "the checkpoint was trained on other data: text, tokenizer, "
                "data.sequence_length or data.held_out differ",
                hint="resume with the [data] table of the checkpoint's run.toml",
            )
        if state.get("seed") != self._dataset.seed:
            raise InputError(
                f"the checkpoint was trained with train.seed = {state.get('seed')}, "
                f"and this run has {self._dataset.seed}: the order of the text differs",
                hint=f"set train.seed to {state.get('seed')}",
            )
        self.position = position
