"""A run that cannot fit into the machine is refused before any rank starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.cli.app import report_errors
from interlace.cli.before_start import (
    GIB,
    check_host_memory,
    check_named_files,
    free_bytes,
    least_parameters,
)
from interlace.cli.run_file import load_run_config
from interlace.errors import InputError


def test_what_is_counted() -> None:
    """Published: 8.03 and 70.6 billion parameters; norms are left out."""
    for name, published in (("llama-3.1-8b", 8.03e9), ("llama-3.1-70b", 70.6e9)):
        found = least_parameters(load_run_config(name, {}))
        assert 0.999 * published < found <= published
    assert least_parameters(load_run_config("mixtral-8x7b", {})) == 0


def test_a_large_model_is_refused() -> None:
    config = load_run_config("llama-3.1-8b", {})
    with pytest.raises(InputError, match=r"needs 120 GiB .* has 23\.0 GiB free") as found:
        check_host_memory(config, 1, 23 * GIB)
    assert "quickstart" in found.value.hint
    with pytest.raises(InputError, match="which each of 8 ranks builds"):
        check_host_memory(config, 8, 200 * GIB)
    check_host_memory(config, 1, 200 * GIB)
    check_host_memory(load_run_config("quickstart", {}), 1)


def test_files_that_a_run_names_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take some 8 s to find out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").touch()
    for key, right in {
        "data.path": ("here.txt", "*.txt", "~", "stdlib"),
        "data.tokenizer": ("here.txt", "bytes"),
        "plan.file": ("here.txt", ""),
        "model.config": (str(tmp_path), ""),
    }.items():
        with pytest.raises(InputError, match=f"{key} = 'away.*' does not exist"):
            check_named_files(load_run_config("quickstart", {key: "away*"}))
        for path in right:
            check_named_files(load_run_config("quickstart", {key: path}))


def test_free_memory(tmp_path: Path) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:  2048 kB\nMemAvailable:  1024 kB\n")
    assert free_bytes(meminfo, limit) == 2**20
    limit.write_text("max\n")
    assert free_bytes(meminfo, limit) == 2**20
    limit.write_text("4096\n")
    assert free_bytes(meminfo, limit) == 4096
    assert free_bytes(tmp_path / "none", limit) is None


def test_a_full_disk_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    def writes() -> int:
        with Path("/dev/full").open("w") as file:
            file.write("x" * 10_000)
        return 0

    assert report_errors(writes, verbose=False) == 1
    text = capsys.readouterr().err
    assert "error: cannot write the output: No space left on device" in text
    assert "hint: free space, or set output.directory" in text


def test_a_terminal_gets_tables_and_no_plan(tmp_path: Path) -> None:
    """The plan's hundreds of lines would push its tables off the screen."""
    master, terminal = os.openpty()
    run = subprocess.run(
        [sys.executable, "-m", "interlace", "plan", "quickstart", "--model.layers", "1",
         "--link.rate", "1gbit", "--hardware.peak_tflops", "1", "--hardware.memory_gb_per_s", "9"],
        stdout=terminal, stderr=subprocess.PIPE, text=True,
        cwd=tmp_path, timeout=100, check=False,
    )  # fmt: skip
    os.close(terminal)
    os.set_blocking(master, False)
    with pytest.raises(OSError, match=r"Input/output error|temporarily unavailable"):  # nothing
        os.read(master, 1)
    os.close(master)
    assert run.returncode == 0
    assert "lines: -o FILE writes them, and | less shows them" in run.stderr
