"""Metrics: every event reaches the file as valid JSON, a lost disk ends the run with a message."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interlace.cli.run_file import load_run_config
from interlace.config import ModelConfig
from interlace.errors import InputError, RunError
from interlace.hardware.devices import peak_flops
from interlace.model_config import ExpertsConfig
from interlace.run_files import read_metrics
from interlace.text import bits_per_byte, in_bits
from interlace.train.metrics import MetricsWriter, model_flops_per_token, step_line


def test_events_read_back_as_written(tmp_path: Path) -> None:
    """Tensors, numpy values, nesting, NaN and infinities survive; each line is strict JSON."""
    with MetricsWriter(tmp_path / "run", tensorboard=False) as writer:
        writer.write("start", folder=tmp_path, sizes=(1, 2), nested={"rates": [math.inf, 1]})
        writer.write("step", step=1, loss=torch.tensor(2.5), grad=np.float32(0.5), bad=math.nan)
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    for line in lines:
        json.loads(line, parse_constant=pytest.fail)
    start, step = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert start["folder"] == str(tmp_path)
    assert start["sizes"] == [1, 2]
    assert start["nested"] == {"rates": [math.inf, 1]}
    assert (step["event"], step["step"], step["loss"], step["grad"]) == ("step", 1, 2.5, 0.5)
    assert math.isnan(step["bad"])
    assert step["unix_time_s"] >= start["unix_time_s"] > 1e9


def test_each_event_is_in_the_file_before_write_returns(tmp_path: Path) -> None:
    """A run that is killed keeps what it wrote: nothing waits in a buffer."""
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(3):
        writer.write("step", step=step)
        assert read_metrics(writer.path)[-1]["step"] == step
    writer.close()
    writer.close()


def test_disk_full_is_a_run_error(tmp_path: Path) -> None:
    """/dev/full refuses every write, as a full disk does."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path, tensorboard=False)
    with pytest.raises(RunError, match=r"metrics\.jsonl: No space left on device") as caught:
        writer.write("step", step=1)
    assert "free some space" in caught.value.hint
    writer.close()


def test_vanished_folder_is_a_run_error(tmp_path: Path) -> None:
    """Linux would go on writing to the deleted file, where nobody finds it."""
    writer = MetricsWriter(tmp_path / "run", tensorboard=False)
    writer.write("step", step=1)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunError, match="deleted while the run went on"):
        writer.write("step", step=2)
    writer.close()


def test_folder_that_cannot_be_made_is_an_input_error(tmp_path: Path) -> None:
    """The output folder lies under a file."""
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="Not a directory"):
        MetricsWriter(tmp_path / "file" / "run", tensorboard=False)


def test_half_a_line_at_the_end_is_reported_and_not_glued_to_the_next(tmp_path: Path) -> None:
    """A killed run's last line is said to be cut; writing on starts a line of its own."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event":"step","step":1}\n{"event":"st')
    assert read_metrics(path) == [
        {"event": "step", "step": 1},
        {"event": "truncated", "line": 2, "size_bytes": 12},
    ]
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write("step", step=2)
    assert [event["step"] for event in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("line", ["{", "[1]", '{"step": 1}', "", "\x00"])
def test_a_broken_line_in_the_middle_is_refused(line: str, tmp_path: Path) -> None:
    """Only the end may be cut: anything else names file and line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"event":"a"}}\n{line}\n{{"event":"b"}}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)
    with pytest.raises(InputError, match="cannot read"):
        read_metrics(tmp_path / "missing.jsonl")


def test_tensorboard_gets_the_numbers_of_steps(tmp_path: Path) -> None:
    """Scalars appear as event/key at their step, those of tables as event/key/key, lists of numbers
    as histograms; text and events without a step do not."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write("start", seed=1)
        for step in (1, 2):
            writer.write("step", step=step, loss=float(step), mode="two", last=step > 1)
        exchanges = {"all_to_all.ep": {"bytes": 4096, "exposed_ms": 1.5}}
        writer.write("step", step=3, expert_load=[0.5, 0.25, 0.25], collectives=exchanges, of=["a"])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tables = [f"step/collectives/all_to_all.ep/{key}" for key in ("bytes", "exposed_ms")]
    assert events.Tags()["scalars"] == ["step/loss", *tables]
    assert [events.Scalars(tag)[0].value for tag in tables] == [4096, 1.5]
    (load,) = events.Histograms("step/expert_load")
    assert events.Tags()["histograms"] == ["step/expert_load"]
    assert (load.step, load.histogram_value.num, load.histogram_value.max) == (3, 3, 0.5)
    assert [(e.step, e.value) for e in events.Scalars("step/loss")] == [(1, 1.0), (2, 2.0)]


def test_missing_tensorboard_is_an_input_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is named before anything is written."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="needs the package tensorboard") as caught:
        MetricsWriter(tmp_path / "run", tensorboard=True)
    assert "pip install interlace[tensorboard]" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_reading_metrics_needs_no_torch() -> None:
    """The report reads metrics on machines where importing torch takes seconds."""
    code = "import sys, interlace.train.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_step_line_has_what_is_there() -> None:
    """All fields in order; absent and None fields leave no trace; NaN is shown as it is. No line is
    wider than a terminal, whatever a run shows."""
    values = {
        "step": 12,
        "steps": 150,
        "loss": 2.913,
        "bits_per_byte": 4.2,
        "tokens_per_s": 31204.0,
        "step_ms": 131.0,
        "exposed_ms": 12.0,
        "mfu": 0.412,
        "lr": 2.1e-3,
        "grad_norm": 0.92,
    }
    assert step_line(values) == (
        "step    12/150  loss 2.913  31,204 tok/s  131 ms  lr 2.1e-03  grad 0.92\n"
        "                MFU 41.2 %  exposed 12 ms (9 %)"
    )
    large = {"step": 123_456, "steps": 200_000, "tokens_per_s": 12_345_678.0, "step_ms": 123_456.0}
    lines = step_line(
        {**values, **large, "expert_imbalance": 12.5, "bubble_fraction": 0.1, "exposed_ms": 9999.0}
    ).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 3
    assert step_line({"step": 3, "loss": math.nan, "mfu": None}) == "step     3  loss nan"
    rows, counts = {"bytes": 3 << 20, "exposed_ms": 4.0}, {"bytes": 64, "exposed_ms": 0.5}
    exchanged = {"all_to_all.ep": rows, "all_to_all.ep_counts": counts, "all_reduce.dp": rows}
    assert step_line({"expert_imbalance": 1.5, "collectives": exchanged}) == (
        "experts 1.50x  all-to-all 3.0 MiB, exposed 4.50 ms"
    )
    assert step_line({"exposed_ms": 1.25, "step_ms": 9.0, "event": "step"}) == (
        "9.00 ms  exposed 1.25 ms (14 %)"
    )


def test_bits_per_byte() -> None:
    """A uniform guess among 256 bytes costs 8 bits; a token of 4 bytes shares its loss."""
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8)
    assert bits_per_byte(math.log(65536), 4.0) == pytest.approx(4)
    assert in_bits(math.log(65536), 4.0) == "4.000 bits per byte"


def test_bits_per_token_where_bytes_are_not_known() -> None:
    """Token ids that were made elsewhere have no bytes: no number is made up, the unit is said."""
    assert bits_per_byte(1.0, None) is None
    assert in_bits(math.log(65536), None) == "16.000 bits per token"
    assert step_line({"step": 1, "loss": 2.0, "bits_per_byte": None}) == "step     1  loss 2.000"


@pytest.mark.parametrize(
    ("model", "vocab_size", "all_parameters"),
    [
        (
            ModelConfig(layers=32, width=4096, heads=32, kv_heads=32, ffn_width=11008),
            32000,
            6_738_415_616,
        ),
        (
            ModelConfig(layers=32, width=4096, heads=32, kv_heads=8, ffn_width=14336),
            128256,
            8_030_261_248,
        ),
    ],
    ids=["Llama-2-7B", "Llama-3-8B"],
)
def test_model_flops_of_published_models(
    model: ModelConfig, vocab_size: int, all_parameters: int
) -> None:
    """Published parameter counts less embedding and 65 norms are the matmul parameters."""
    matmul_parameters = all_parameters - vocab_size * 4096 - 65 * 4096
    expected = 6 * matmul_parameters + 12 * 32 * 4096 * 2048
    assert model_flops_per_token(model, vocab_size, 2048) == expected


def test_model_flops_of_experts() -> None:
    """A token costs what it meets: its experts, their router, the shared feed-forward, and in the
    first layers a dense one; of Mixtral 8x7B that is 12.9 billion parameters."""
    mixtral = load_run_config("mixtral-8x7b").model
    flops = model_flops_per_token(mixtral, 32000, 2048)
    assert flops is not None
    matmul_parameters = (flops - 12 * 32 * 4096 * 2048) // 6
    assert matmul_parameters + 32000 * 4096 == pytest.approx(12.9e9, rel=0.005)
    experts = ExpertsConfig(count=8, chosen=2, ffn_width=10, shared_width=12, dense_layers=1)
    small = ModelConfig(
        architecture="moe", layers=3, width=8, heads=2, kv_heads=1, head_size=6, ffn_width=32,
        experts=experts,
    )  # fmt: skip
    attention = 3 * (2 * 8 * 12 + 2 * 8 * 6)
    feed_forward = 3 * 8 * 32 + 2 * (3 * 8 * (2 * 10 + 12) + 8 * 8)
    expected = 6 * (attention + feed_forward + 8 * 100) + 12 * 3 * 12 * 16
    assert model_flops_per_token(small, 100, 16) == expected


def test_model_flops_of_a_gpt() -> None:
    """Its feed-forward has two matrices, Llama's three."""
    gpt = ModelConfig(architecture="gpt", layers=2, width=8, heads=2, kv_heads=2, ffn_width=32)
    matmul_parameters = 2 * (4 * 8 * 8 + 2 * 8 * 32) + 8 * 100
    assert model_flops_per_token(gpt, 100, 16) == 6 * matmul_parameters + 12 * 2 * 8 * 16
    assert model_flops_per_token(replace(gpt, source="hugging_face"), 100, 16) is None
    unknown: Any = "mamba"
    assert model_flops_per_token(replace(gpt, architecture=unknown), 100, 16) is None


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "torch.bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA L40", "bfloat16", 181.05e12),
        ("NVIDIA L40S", "bfloat16", 362.05e12),
        ("NVIDIA B200", "float32", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", None),
        ("cpu", "float32", None),
        ("NVIDIA H100 PCIe", "float8_e4m3fn", None),
    ],
)
def test_peak_is_known_or_none(name: str, dtype: str, peak: float | None) -> None:
    """A variant of a known GPU (a slice, a laptop) does not get the whole GPU's peak."""
    assert peak_flops(name, dtype) == peak
