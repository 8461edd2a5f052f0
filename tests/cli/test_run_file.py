"""Run files: what is wrong with one is said with file, key, value and what was expected."""

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.cli.run_file import load_run_config, preset_files, save_run_config
from interlace.config import DataConfig, RunConfig, TrainConfig
from interlace.errors import InputError
from interlace.rules import check


def write(folder: Path, text: str) -> str:
    file = folder / "run.toml"
    file.write_text(text)
    return str(file)


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path):
    """Values of every type arrive with their type; a whole number will do where one may be real."""
    config = load_run_config(
        write(
            tmp_path,
            'strands = "eager"\n[train]\nsteps = 7\ndeterministic = false\n'
            '[optimizer]\nclip_norm = 2\n[compare]\nmodes = ["1", 2]\n[data]\npath = "x"\n',
        )
    )
    assert config.strands == "eager"
    assert config.train == replace(RunConfig().train, steps=7, deterministic=False)
    assert config.optimizer.clip_norm == 2.0
    assert isinstance(config.optimizer.clip_norm, float)
    assert config.compare.modes == ("1", "2")
    assert config.data.path == "x"
    assert config.model == RunConfig().model


def test_overrides_win_over_the_file(tmp_path):
    """Flags are text; they become the type of their field and replace the file's value."""
    path = write(tmp_path, "strands = 2\n[train]\nsteps = 7\nseed = 3\n")
    overrides = {
        "strands": "1",
        "train.steps": "8",
        "train.deterministic": "false",
        "optimizer.learning_rate": "3e-4",
        "compare.modes": "eager, 2",
        "data.path": "a, b",
    }
    config = load_run_config(path, overrides)
    assert (config.strands, config.train.steps, config.train.seed) == ("1", 8, 3)
    assert config.train.deterministic is False
    assert config.optimizer.learning_rate == 3e-4
    assert config.compare.modes == ("eager", "2")
    assert config.data.path == "a, b"


def test_strands_may_be_a_number(tmp_path):
    """`strands = 2` is what people write first."""
    assert load_run_config(write(tmp_path, "strands = 2\n")).strands == "2"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[train]\nstpes = 3", "unknown key train.stpes", "did you mean 'train.steps'?"),
        ("[trian]\nsteps = 3", "unknown key trian", "did you mean 'train'?"),
        ("steps = 3", "unknown key steps", "did you mean train.steps or compare.steps?"),
        ("[model]\nsteps = 3", "unknown key model.steps", "train.steps or compare.steps"),
        ("train = 3", "train = 3 must be a table", "write [train]"),
        ('[train]\nsteps = "8"', "train.steps = '8' must be a whole number", "train.steps = 100"),
        ("[train]\nsteps = 8.0", "train.steps = 8.0 must be a whole number", "train.steps = 100"),
        ("[train]\nsteps = true", "train.steps = True must be a whole number", "as in"),
        ("[data]\nheld_out = '1'", "data.held_out = '1' must be a number", "data.held_out = 0.02"),
        ("[plan]\ncache = 1", "plan.cache = 1 must be true or false", "plan.cache = true"),
        ("[data]\npath = 1", "data.path = 1 must be text in quotes", 'data.path = "stdlib"'),
        ("strands = 3", 'strands = 3 must be one of "2", "1", "eager"', 'strands = "2"'),
        ("strands = true", "strands = True must be one of", "as in"),
        ('[compare]\nmodes = "1"', "compare.modes = '1' must be a list", 'modes = ["eager", "1"'),
        ("[compare]\nmodes = [3]", "compare.modes = [3] must be one of", "as in"),
        ("[train]\nsteps = ", "line 2: Invalid value: steps =", "text needs quotes"),
        ("[train]\na = b c\n", "line 2: ", "text needs quotes"),
        ("[train", "line 1: ", "a table starts with [name]"),
        ("[train]\nseed = 1\nseed = 2", "line 3: this key or table was given before", "remove one"),
        ("[train]\n[data]\n[train]", "was given before: [train]", "remove one"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_are_named(tmp_path, text, message, hint):
    """Each message starts with the file and holds the key; the hint says what to write."""
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_run_config(path)
    assert caught.value.message.startswith(path)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("key", "text", "message", "hint"),
    [
        ("train.stpes", "3", "unknown key train.stpes", "train.steps"),
        ("nonsense.steps", "3", "unknown key nonsense", "known names"),
        ("train.steps", "3.5", "train.steps = '3.5' must be a whole number", "train.steps = 100"),
        ("train", "3", "train = '3' must be a table", "steps"),
        ("plan.cache", "maybe", "plan.cache = 'maybe' must be true or false", "as in"),
        ("compare.modes", "1,3", "must be one of", "as in"),
    ],
)
def test_mistakes_in_overrides_are_named(key, text, message, hint):
    """The same messages, said of the command line."""
    with pytest.raises(InputError) as caught:
        load_run_config("quickstart", {key: text})
    assert caught.value.message.startswith("command line: ")
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_paths_that_are_no_run_file(tmp_path):
    """Missing, a folder, not text, a misspelt preset: each says which."""
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in {
        str(tmp_path / "none.toml"): "there is no run file",
        str(tmp_path): "is not a file",
        str(binary): "is not UTF-8 text",
    }.items():
        with pytest.raises(InputError, match=message):
            load_run_config(path)
    with pytest.raises(InputError, match="no run file or preset 'dmo'") as caught:
        load_run_config("dmo")
    assert caught.value.hint == "did you mean 'demo'?"


def test_a_file_wins_over_a_preset_of_its_name(tmp_path, monkeypatch):
    """What lies in the working directory is what the user means."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").write_text("[train]\nsteps = 5\n")
    assert load_run_config("demo").train.steps == 5


@pytest.mark.parametrize("name", sorted(preset_files()))
def test_presets_are_valid(name):
    """Every shipped run file passes the checks, as it is and on the ranks it asks for."""
    config = load_run_config(name)
    check(config)
    assert config.train.steps < 1000


def test_presets_are_there():
    """The names that the help text and the README use."""
    assert {"demo", "quickstart"} <= set(preset_files())


def test_experts_are_dealt_by_one_flag():
    """The preset has the data ranks that share them."""
    config = load_run_config("moe-quickstart", {"parallel.expert": "2"})
    check(config)
    assert config.parallel.ranks == 2


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    number=st.floats(allow_nan=False),
    whole=st.integers(-(2**62), 2**62),
    flag=st.booleans(),
)
def test_saving_drops_nothing(tmp_path_factory, text, number, whole, flag):
    """Any text and number survives writing and reading; every field is in the file."""
    config = RunConfig(
        strands="eager",
        data=DataConfig(path=text, held_out=number),
        train=TrainConfig(seed=whole, deterministic=flag),
    )
    file = tmp_path_factory.mktemp("saved") / "deep" / "run.toml"
    save_run_config(config, file)
    assert load_run_config(str(file)) == config
    written = file.read_text()
    for table in fields(RunConfig):
        assert table.name in written


def test_infinity_is_read_and_then_refused(tmp_path):
    """TOML has inf; the file is well formed, and `check` says what is wrong with it."""
    config = load_run_config(write(tmp_path, "[optimizer]\nlearning_rate = inf\n"))
    assert config.optimizer.learning_rate == math.inf
    with pytest.raises(InputError, match=r"optimizer\.learning_rate"):
        check(config)


def test_old_names_of_searches_still_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file and on the command line, each with one note, by the first rank alone."""
    monkeypatch.delenv("RANK", raising=False)
    path = write(tmp_path, '[plan]\nsearch = "exact"\n[compare]\nmodes = ["1", "list"]\n')
    config = load_run_config(path, {"compare.modes": "eager,paper"})
    assert (config.plan.search, config.compare.modes) == ("merge", ("eager", "segment_pairs"))
    assert caplog.messages == [
        f'note: {path}: plan.search = "exact" is now called "merge"',
        'note: command line: compare.modes = "paper" is now called "segment_pairs"',
    ]
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    assert load_run_config(path).plan.search == "merge"
    assert not caplog.messages


@pytest.mark.parametrize(
    ("tables", "message", "hint"),
    [
        ('[plan]\ncluster = "h10"', "there is no cluster 'h10'", "h100"),
        (
            '[plan]\ncluster = "h100"\n[link]\nrate = "1gbit"',
            "plan.cluster = 'h100' says how fast devices and links are, and so does the run: "
            "link.rate = '1gbit'",
            "leave one of the two out",
        ),
        ('[plan]\ncluster = "none.toml"', "there is no cluster file none.toml", "preset"),
    ],
)
def test_a_cluster_that_cannot_be_planned_for(tmp_path, tables, message, hint):
    """`train` and `plan` say so alike, when the file is read."""
    with pytest.raises(InputError) as refused:
        check(load_run_config(write(tmp_path, tables + "\n")))
    assert message in refused.value.message
    assert hint in refused.value.hint
