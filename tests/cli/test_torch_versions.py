"""Proves that `make test-torch` installs the torch that is asked for, runs what is asked for there,
and says what failed; nothing is really installed."""

import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PINS = ("pyproject.toml", "constraints.txt", "tests/torchtitan.txt")
Runs = list[list[str]]


@pytest.fixture
def script() -> ModuleType:
    path = ROOT / "scripts" / "test_torch.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def started(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Runs]:
    """Commands are noted, not run; those with one of these words exit with that code."""
    test = tmp_path / "tests" / "pure" / "test_one.py"
    test.parent.mkdir(parents=True)
    for name in PINS:
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    test.write_text("")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "QUICK", ("tests/pure/test_one.py",))

    def note(**codes: int) -> Runs:
        found: Runs = []

        def run(command: list[str], *, env: dict[str, str], cwd: Path, **_: Any) -> Any:
            assert (env["PYTHONPATH"].split(os.pathsep)[0], cwd) == (str(cwd / "src"), tmp_path)
            found.append(command)
            if "venv" in command:
                Path(command[-1]).mkdir(parents=True, exist_ok=True)
            hit = [code for word, code in codes.items() if any(word in each for each in command)]
            return subprocess.CompletedProcess(command, hit[0] if hit else 0)

        monkeypatch.setattr(script.subprocess, "run", run)
        return found

    return note


def test_the_quick_files_are_there(script: ModuleType) -> None:
    assert tuple(dict.fromkeys(script.QUICK)) == script.QUICK
    assert len(script.QUICK) > 10
    assert set(script.QUICK) < set(script.test_files(["all"]))
    assert script.test_files(["quick"]) == list(script.QUICK)
    assert script.test_files(["tests/a.py", "tests/b.py"]) == ["tests/a.py", "tests/b.py"]


def test_all_but_torch_is_installed_as_continuous_integration_has_it(
    script: ModuleType,
    started: Callable[..., Runs],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The package's own bound on torch has no say: a version beyond it is what is tried."""
    commands = started()
    assert script.main(["2.99.0"]) == 0
    made, _, dependencies, package, titan, tests = commands
    folder = tmp_path / "build" / "torch-2.99.0"
    python = str(folder / "bin" / "python")
    assert made == [sys.executable, "-m", "venv", str(folder)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    given = dependencies[dependencies.index("torch==2.99.0") :]
    assert given == ["torch==2.99.0", *(each for each in wanted if not each.startswith("torch>"))]
    assert len(given) == len(wanted)
    pins = (folder / "constraints.txt").read_text().splitlines()
    assert dependencies[dependencies.index("-c") + 1] == str(folder / "constraints.txt")
    every = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in every if line not in pins] == [
        line for line in every if line.startswith("torch==")
    ]
    assert package[-3:] == ["--no-deps", "-e", str(tmp_path)]
    assert titan[-4:-1] == ["--target", str(folder / "torchtitan"), "-r"]
    assert titan[-1] == str(tmp_path / "tests" / "torchtitan.txt")
    assert tests == [python, "-m", "pytest", "-q", "tests/pure/test_one.py"]
    said = capsys.readouterr().out
    assert "tests/pure/test_one.py passed on torch 2.99.0" in said
    assert said.splitlines()[-1] == "test-torch: passed"


def test_what_is_installed_stays_until_the_pins_change(
    script: ModuleType, started: Callable[..., Runs], tmp_path: Path
) -> None:
    commands = started()
    script.main(["2.99.0"])
    ready = tmp_path / "build" / "torch-2.99.0" / ".ready"
    for older in (1, -1):
        commands.clear()
        time = ready.stat().st_mtime - older
        for name in PINS:
            os.utime(tmp_path / name, (time, time))
        assert script.main(["2.99.0"]) == 0
        assert len(commands) == (1 if older > 0 else 6)


@pytest.mark.parametrize(("code", "said"), [(1, "FAILED"), (5, "no tests"), (0, "passed")])
def test_a_file_that_fails_is_named_and_the_others_run(
    script: ModuleType,
    started: Callable[..., Runs],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    code: int,
    said: str,
) -> None:
    """A file without a test for this machine has not failed."""
    (tmp_path / "tests" / "pure" / "test_another.py").write_text("")
    commands = started(test_another=code)
    assert script.main(["2.99.0", "all"]) == (1 if code == 1 else 0)
    assert [each[-1] for each in commands[-2:]] == [
        "tests/pure/test_another.py",
        "tests/pure/test_one.py",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert f"test_another.py {said} on" in lines[-3]
    failed = "test-torch: FAILED: tests/pure/test_another.py"
    assert lines[-1] == (failed if code == 1 else "test-torch: passed")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ([""], "'' is no version of torch", "make test-torch TORCH=2.15.0"),
        (["newest"], "'newest' is no version of torch", "make test-torch TORCH=2.15.0"),
        (["2.15.0", "tests/none.py"], "no test file tests/none.py", "TESTS is quick, all, or"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    script: ModuleType,
    started: Callable[..., Runs],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
    hint: str,
) -> None:
    commands = started()
    assert script.main(words) == 2
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"test-torch: {message}, nothing was run"
    assert second.startswith(f"hint: {hint}")
    assert not commands


def test_a_torch_that_pip_does_not_find_runs_nothing(
    script: ModuleType, started: Callable[..., Runs], capsys: pytest.CaptureFixture[str]
) -> None:
    """The next call tries again."""
    for _ in range(2):
        commands = started(**{"torch==2.99.0": 1})
        assert script.main(["2.99.0"]) == 2
        assert len(commands) == 3
        assert "torch 2.99.0 could not be installed, nothing was run" in capsys.readouterr().out
