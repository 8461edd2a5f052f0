"""A search that was made before is read from disk; whatever decides it is in its name."""

import json
from dataclasses import replace

import pytest

from interlace.config import DataConfig, ParallelConfig, RunConfig, TrainConfig
from interlace.errors import InputError
from interlace.hardware.cluster_size import load_sized_cluster
from interlace.model_config import ModelConfig
from interlace.strategy.layout_space import LayoutSpace
from interlace.strategy.search_cache import cached_search, search_key

LLAMA = RunConfig(
    model=ModelConfig(layers=8, width=2048, heads=16, kv_heads=8, ffn_width=5632, vocab_size=32000),
    data=DataConfig(sequence_length=2048),
    train=TrainConfig(dtype="bfloat16", recompute="attention"),
    parallel=ParallelConfig(tensor=4, zero=1),
)


def space_of(config=LLAMA, cluster="a100-80x8", batch=16):
    on, devices = load_sized_cluster(cluster)
    return LayoutSpace(config=config, cluster=on, devices=devices, global_batch=batch)


def test_a_search_is_found_again(tmp_path):
    """With the same layouts, times and counts; what is damaged is searched again, and said."""
    said: list[str] = []
    space = space_of()
    first = cached_search(space, tmp_path, said.append)
    (path,) = tmp_path.iterdir()
    said.clear()
    second = cached_search(space, tmp_path, said.append)
    assert said == [f"found before: {path}"]
    assert [(j.layout, j.step.step_ns) for j in second.best] == [
        (j.layout, j.step.step_ns) for j in first.best
    ]
    for name in ("one_strand", "two_strands"):
        assert getattr(second, name).seconds == getattr(first, name).seconds
    assert second.gain == first.gain
    assert second.run() == first.run()
    for name in ("looked_at", "too_large", "simulated", "exhaustive"):
        assert getattr(second, name) == getattr(first, name)
    for damage in ("{", "[]", json.dumps({"best": [{"tensors": 1}]})):
        path.write_text(damage)
        said.clear()
        assert cached_search(space, tmp_path, said.append).run() == first.run()
        assert said[0] == f"{path} cannot be read and is written anew"
    assert cached_search(space, None).run() == first.run()


def test_names_tell_searches_apart():
    """By model, sequence, what is kept, cluster, devices and batch; not by where the run writes."""
    other = replace(LLAMA, data=DataConfig(sequence_length=4096))
    kept = replace(LLAMA, parallel=ParallelConfig(tensor=2, zero=1))
    one = replace(LLAMA, strands="1")
    spaces = [
        space_of(),
        space_of(other),
        space_of(kept),
        space_of(one),
        space_of(cluster="a100-80x16"),
        space_of(cluster="h100x8"),
        space_of(batch=32),
    ]
    assert len({search_key(space) for space in spaces}) == len(spaces)
    assert search_key(space_of()) == search_key(space_of())


def test_what_is_refused_is_not_kept(tmp_path):
    """The next search refuses it again."""
    wide = replace(LLAMA, parallel=ParallelConfig(data_replicate=16))
    for _ in range(2):
        with pytest.raises(InputError, match="cannot be dealt"):
            cached_search(space_of(wide, cluster="a100-80x64", batch=7), tmp_path)
    assert not list(tmp_path.iterdir())
