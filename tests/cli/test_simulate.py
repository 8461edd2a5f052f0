"""`interlace simulate` as a user types it: text, files, and what is wrong."""

import json

import pytest

from interlace.__main__ import main

RUN = """
[model]
layers = 8
width = 1024
heads = 8
kv_heads = 8
ffn_width = 4096
vocab_size = 32000
[parallel]
tensor = 4
pipeline = 4
[pipeline]
schedule = "folded"
[data]
sequence_length = 2048
[train]
micro_batches = 8
micro_batch_size = 1
dtype = "bfloat16"
"""


@pytest.fixture
def run_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return file


def test_all_that_is_written(run_file, tmp_path, capsys):
    files = {name: tmp_path / name for name in ("trace.json", "picture.png", "data.json")}
    trace, picture, data = files.values()
    arguments = ["--cluster", "h100", "--trace", str(trace), "--picture", str(picture)]
    assert main(["simulate", str(run_file), *arguments, "--json", str(data)]) == 0
    out = capsys.readouterr().out
    assert "on 16 ranks of h100: tensor 4, pipeline 4" in out
    assert "MFU" in out
    assert "expected error: 15 %" in out
    assert "the gain of two strands: 4 points off (DHelix, 15 rows on A40 and A800" in out
    figures = json.loads(data.read_text())
    assert figures["ranks"] == 16
    assert figures["fits"] is True
    assert len(figures["memory_bytes"]) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {f"simulated, rank {rank}" for rank in range(4)} <= names
    assert any(name.startswith("operators of forward_") for name in names)
    longest = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert longest == pytest.approx(1e6 * figures["step_s"], rel=1e-6)


def test_what_is_wrong(run_file, capsys):
    """A cluster that is not known, devices that do not fit, a model that does not."""
    for cluster, message in (
        ("h10", "there is no cluster 'h10'"),
        ("h100x8", "the layout needs 16 ranks"),
        ("h100x15", "do not fill hosts"),
    ):
        assert main(["simulate", str(run_file), "--cluster", cluster]) == 2
        assert message in capsys.readouterr().err
    wide = [
        "--model.layers",
        "64",
        "--model.width",
        "32768",
        "--model.heads",
        "256",
        "--model.kv_heads",
        "256",
    ]
    assert main(["simulate", str(run_file), "--cluster", "h100", *wide]) == 0
    assert "it does not fit" in capsys.readouterr().out


def test_plain_words(tmp_path, capsys):
    """--model and --sequence, on both commands; of a family the newest; and uneven experts."""
    model = ["--model", "llama-8b", "--sequence=2048", "--parallel.tensor", "8"]
    assert main(["simulate", *model, "--cluster", "h100", "--train.dtype", "bfloat16"]) == 0
    assert "llama, 8.0B parameters" in capsys.readouterr().out
    mixture = ["--model", "phi-3.5-moe", "--parallel.expert", "8", "--parallel.data_shard", "64"]
    load = ["--expert-load", "1.5", "--train.dtype", "bfloat16"]
    assert main(["simulate", *mixture, *load, "--cluster", "h100x64"]) == 0
    assert "the fullest expert with 1.5 x its share" in capsys.readouterr().out
    run = tmp_path / "run.toml"
    search = ["--cluster", "h100x8", "--global-batch", "8", "--parallel.tensor", "8"]
    search += ["--train.recompute", "layer", "--strands", "1"]
    assert main(["plan", *model[:3], *search, "-o", str(run)]) == 0
    assert "sequence_length = 2048" in run.read_text()
    for words, message in (
        (["plan", "--model", "llama-9b"], "there is no model 'llama-9b'"),
        (["plan", "demo", "--model", "llama-8b"], "are both given"),
        (["simulate", *model, "--cluster", "h100", *load], "the model has no experts"),
        (["plan", "demo", "--expert-load", "2"], "--global-batch is not given"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_steps_that_vary(run_file, tmp_path, capsys):
    """A line for each sort of variation that is asked for, and the seconds in the file."""
    data = tmp_path / "data.json"
    arguments = ["--cluster", "h100", "--noise", "0.05", "--straggler", "1.2", "--json", str(data)]
    assert main(["simulate", str(run_file), *arguments]) == 0
    out = capsys.readouterr().out
    assert "passes vary by 0.05 of their mean: step " in out
    assert "one device computes 1.2 times as long: step " in out
    figures = json.loads(data.read_text())
    assert all(each > figures["step_s"] for each in figures["varied_step_s"].values())
    assert len(figures["varied_step_s"]) == 2
    for wrong, said in (("--noise", "no deviation over a mean"), ("--straggler", "faster than")):
        assert main(["simulate", str(run_file), "--cluster", "h100", wrong, "-2"]) != 0
        assert said in capsys.readouterr().err
