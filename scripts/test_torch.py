"""`make test-torch TORCH=2.15.0`: the tests on another version of torch, beside `.venv`.

Makes build/torch-2.15.0, a virtual environment with that torch and everything else as
constraints.txt has it, and runs test files there, each in a process of its own, with a line for
each. `TESTS=quick`, the default, runs the files that reach torch's private APIs; `TESTS=all` runs
all; a path or several run these. Where pip should find torch is said as pip itself is told, as by
PIP_EXTRA_INDEX_URL. Exits 1 if a file fails, 2 if nothing could be run.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
QUICK = (
    "tests/pure/test_structure.py",
    "tests/cli/test_commands.py",
    "tests/gloo/test_trace_errors.py",
    "tests/gloo/test_compile_step.py",
    "tests/gloo/test_step_binding.py",
    "tests/gloo/test_gradient_layouts.py",
    "tests/gloo/test_fully_shard.py",
    "tests/gloo/test_tensor_parallel.py",
    "tests/gloo/test_context_graphs.py",
    "tests/gloo/test_recompute.py",
    "tests/gloo/test_recorder_clock.py",
    "tests/gloo/test_decompose_pass.py",
    "tests/gloo/test_cuda_start.py",
    "tests/gloo/test_compare.py",
    "tests/gloo/test_hugging_face.py",
)
"""Chosen to make the calls of `graphs/torch_private.py`, and every pass over graphs."""
PASSED, NO_TESTS = 0, 5
"""Exit codes of pytest; a file may have no test that this machine can run."""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="test_torch.py")
    parser.add_argument("torch", help="version, as 2.15.0")
    parser.add_argument("tests", nargs="*", default=["quick"], help="quick, all, or files")
    given = parser.parse_args(words)
    if not re.fullmatch(r"\d+\.\d+\.\d+\S*", given.torch):
        print(f"test-torch: {given.torch!r} is no version of torch, nothing was run")
        print("hint: make test-torch TORCH=2.15.0")
        return 2
    files = test_files(given.tests)
    if lacking := [name for name in files if not (ROOT / name).is_file()]:
        print(f"test-torch: no test file {lacking[0]}, nothing was run")
        print("hint: TESTS is quick, all, or files as tests/gloo/test_strands.py")
        return 2
    if sys.version_info < OLDEST_PYTHON:
        print(f"test-torch: this is Python {sys.version.split()[0]}, nothing was run")
        print(f"hint: make test-torch TORCH={given.torch} PYTHON=python3.11")
        return 2
    folder = ROOT / "build" / f"torch-{given.torch}"
    if not install(folder, given.torch):
        print(f"test-torch: torch {given.torch} could not be installed, nothing was run")
        print(f"hint: what pip says above; {folder} can be removed")
        return 2
    return run(folder, given.torch, files)


def test_files(wanted: Sequence[str]) -> list[str]:
    """Paths below the root, in the order in which they are run."""
    if list(wanted) == ["quick"]:
        return list(QUICK)
    if list(wanted) == ["all"]:
        found = (ROOT / "tests").rglob("test_*.py")
        return sorted(str(path.relative_to(ROOT)) for path in found)
    return list(wanted)


def run(folder: Path, version: str, files: Sequence[str]) -> int:
    """Run the files one after the other; whatever fails is named at the end."""
    failed = []
    for name in files:
        begin = time.monotonic()
        code = execute([str(folder / "bin" / "python"), "-m", "pytest", "-q", name])
        passed = code in (PASSED, NO_TESTS)
        took = f"{time.monotonic() - begin:.0f} s"
        said = "no tests" if code == NO_TESTS else "passed" if passed else "FAILED"
        print(f"test-torch: {name} {said} on torch {version}, {took}", flush=True)
        failed += [] if passed else [name]
    print(f"test-torch: FAILED: {', '.join(failed)}" if failed else "test-torch: passed")
    return int(bool(failed))


def install(folder: Path, version: str) -> bool:
    """Make the environment, unless it is there and newer than what it follows from."""
    ready, constraints = folder / ".ready", folder / "constraints.txt"
    titan = ROOT / "tests" / "torchtitan.txt"
    sources = [ROOT / "pyproject.toml", ROOT / "constraints.txt", titan]
    if ready.exists() and all(ready.stat().st_mtime > each.stat().st_mtime for each in sources):
        return True
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    print(f"test-torch: installing torch {version} in {folder.relative_to(ROOT)}", flush=True)
    if execute([sys.executable, "-m", "venv", str(folder)]) != 0:
        return False
    constraints.write_text(without_torch(sources[1].read_text(encoding="utf-8")))
    pinned = ["-c", str(constraints)]
    # The package itself goes without its dependencies: its own bound may refuse this torch.
    commands = (
        [*pip, "--upgrade", "pip>=25.1"],
        [*pip, *pinned, f"torch=={version}", *requirements()],
        [*pip, *pinned, "--no-deps", "-e", str(ROOT)],
        [*pip, "--no-deps", "--upgrade", "--target", str(folder / "torchtitan"), "-r", str(titan)],
    )
    if any(execute(command) != 0 for command in commands):
        return False
    ready.touch()
    return True


def without_torch(constraints: str) -> str:
    lines = constraints.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"torch\b\s*[=<>~!]", line))


def requirements() -> list[str]:
    """What the package and its development need, but torch."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    return [each for each in needed if re.split(r"[^\w-]", each)[0] != "torch"]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The sources of this checkout come first."""
    paths = [str(ROOT / "src"), given.get("PYTHONPATH", "")]
    return {**given, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def execute(command: Sequence[str]) -> int:
    return subprocess.run(command, env=environment(os.environ), cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
