"""Run files with stages that are laid out each in its own way: how they are written, what each rank
is told, and what is refused."""

from pathlib import Path

import pytest

from interlace.cli.run_file import load_run_config, save_run_config
from interlace.config import RunConfig
from interlace.degrees import of_rank, ranks_of, resolve_layout, stages_of, vocabulary_divisor
from interlace.errors import InputError
from interlace.rules import check

TEXT = """
[parallel]
pipeline = 2
[pipeline]
stages = [{tensor = 4}, {data_replicate = 2, tensor = 2}]
[train]
micro_batch_size = 3
"""


def written(folder: Path, text: str = TEXT, **overrides: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(text)
    return load_run_config(str(file), overrides)


def test_tables_words_and_flags_say_the_same(tmp_path: Path) -> None:
    config = written(tmp_path)
    words = ("tensor=4", "data_replicate=2 tensor=2")
    assert config.pipeline.stages == words
    flags = written(
        tmp_path, TEXT.replace("stages", "# stages"), **{"pipeline.stages": ",".join(words)}
    )
    assert flags == config
    save_run_config(config, tmp_path / "again.toml")
    assert load_run_config(str(tmp_path / "again.toml")) == config


def test_each_rank_is_told_its_stage_and_its_sequences(tmp_path: Path) -> None:
    """Two shares of 3 sequences: a rank of the first stage has both."""
    config = written(tmp_path)
    check(config)
    assert ranks_of(config) == 8
    assert resolve_layout(config, 8) == config
    assert vocabulary_divisor(config) == 4
    first, second = stages_of(config)
    assert (first.tensor, second.tensor, second.data_replicate) == (4, 2, 2)
    seen = [of_rank(config, rank) for rank in (0, 3, 4, 7)]
    assert [each.parallel for each in seen] == [first, first, second, second]
    assert [each.train.micro_batch_size for each in seen] == [6, 6, 3, 3]
    plain = written(tmp_path, "[parallel]\ntensor = 2\n")
    assert of_rank(plain, 1) == plain


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("pipeline = 2", "pipeline = 3", "has 2 layouts, and parallel.pipeline = 3"),
        ("pipeline = 2", "pipeline = 2\ntensor = 2", "parallel.tensor = 2 are both given"),
        ("{tensor = 4}", "{tensr = 4}", "'tensr' is no degree"),
        ("{tensor = 4}", "{tensor = 0}", "'0' is not a number of ranks"),
        ("{tensor = 4}", "{data_replicate = 3}", "cannot be dealt to the 2 of stage 1"),
        ("{tensor = 4}", "{tensor = 3}", "cannot be divided among parallel.tensor = 3"),
        ("[train]", "[overlap]\ndecompose = 'auto'\n[train]", "graphs of stages differ"),
        ("pipeline = 2", "pipeline = 1", "[pipeline] says how stages run"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        check(written(tmp_path, TEXT.replace(old, new)))
    assert words in refused.value.message


def test_another_number_of_ranks_is_refused_with_the_sum(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"need 4 \+ 4 = 8 ranks, and the world size is 6"):
        resolve_layout(written(tmp_path), 6)
