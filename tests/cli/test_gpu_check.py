"""Proves that `make gpu-check` says what is missing, and that its tests import and run with torch
and numpy alone; two of its ranks run here on the CPU."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
WITHOUT_OTHERS = """
import importlib, importlib.machinery, sys
from pathlib import Path

OTHERS = {"cattrs", "cyclopts", "hypothesis", "matplotlib", "ortools", "psutil", "pytest", "rich",
          "safetensors", "tensorboard", "tokenizers", "tomli_w", "transformers"}
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *rest: (
    None if name.partition(".")[0] in OTHERS else find(name, *rest)
)
for path in map(Path, sys.argv[1:]):
    importlib.import_module(path.stem)
assert not OTHERS & sys.modules.keys()
import interlace.bench.graphs, interlace.bench.imagined
print(len(sys.argv) - 1, "imported")
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check() -> ModuleType:
    return load(ROOT / "scripts" / "gpu_check.py")


def lack(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in names else find(name)
    )


@pytest.mark.parametrize(("gpu", "code"), [(True, 2), (False, 0)])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpu: bool,
    code: int,
) -> None:
    """Where there is a GPU the check has failed; elsewhere there was nothing to check."""
    monkeypatch.setattr(check, "has_gpu", lambda: gpu)
    lack(monkeypatch, "numpy")
    assert check.main() == code
    assert capsys.readouterr().out == (
        f"gpu-check: no numpy in {sys.executable}, nothing was run\n"
        f"hint: {sys.executable} -m pip install 'numpy>=2.0'\n"
    )
    lack(monkeypatch, "numpy", "torch")
    assert check.main() == code
    assert "install 'torch>=2.11,<2.16' 'numpy>=2.0'" in capsys.readouterr().out


def test_an_old_python_is_named(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    problem, hint = check.missing()
    assert "interlace needs 3.11" in problem
    assert hint == "make gpu-check PYTHON=python3.11"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(("driver", "code"), [(True, 2), (False, 0)])
def test_no_device_is_said_and_is_no_failure_without_a_driver(
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    driver: bool,
    code: int,
) -> None:
    monkeypatch.setattr(check, "has_gpu", lambda: driver)
    assert check.main() == code
    said = capsys.readouterr().out
    assert "sees no CUDA device, nothing was run" in said
    assert ("install a CUDA build of torch" in said) is driver


@pytest.mark.parametrize("failing", [[], ["test_blocks_cuda", "bench graphs"]])
def test_each_file_and_bench_has_a_process_with_cublas_settled_first(
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    failing: list[str],
) -> None:
    """One that fails does not stop the others, and is named."""
    started: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        started.append((command, env))
        broken = any(name.removeprefix("bench ") in command[-1] for name in failing)
        return subprocess.CompletedProcess(command, int(broken))

    monkeypatch.setattr(check.subprocess, "run", run)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "missing", lambda: ("", ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert check.main() == int(bool(failing))
    names = [command[-1] for command, _ in started[:-2]]
    assert names == sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    assert len(names) > 3
    assert [b for b in check.BENCHES if any(b in c[-1] for c, _ in started[-2:])] == list(
        check.BENCHES
    )
    assert {env["CUBLAS_WORKSPACE_CONFIG"] for _, env in started} == {":4096:8"}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (f"gpu-check: FAILED: {', '.join(failing)}" if failing else "gpu-check: passed")


def test_gpu_tests_import_with_torch_and_numpy_alone(check: ModuleType) -> None:
    files = [str(path) for path in check.test_files()]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OTHERS, *files],
        env=check.environment(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.returncode) == (f"{len(files)} imported\n", 0), done.stderr


def two_ranks(text: str) -> list[str]:
    """A child: the ranks of the GPU test of bits, on gloo and a small model."""
    module = load(ROOT / "tests" / "gpu" / "test_ranks_cuda.py")
    large = module.LARGE
    model = dataclasses.replace(large.model, layers=1, width=32, heads=2, kv_heads=2, ffn_width=48)
    data = dataclasses.replace(large.data, path=text, sequence_length=16)
    plan = dataclasses.replace(large.plan, search="list", profile_repeats=1)
    train = dataclasses.replace(large.train, micro_batches=2)
    small = dataclasses.replace(large, model=model, data=data, plan=plan, train=train)
    return module.steps(small)


def test_the_ranks_of_the_gpu_test_run(tmp_path: Path) -> None:
    from processes import run_ranks

    text = tmp_path / "text"
    text.write_text("the ranks of a test for two devices run on none.\n" * 200)
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    results = run_ranks("test_gpu_check:two_ranks", 2, args=[str(text)], env=env, timeout_s=100)
    assert [result.value for result in results] == [[], []]
