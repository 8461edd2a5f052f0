"""`make gpu-check`: every GPU test and every GPU bench there is, with plain python3.

Needs python 3.11, a CUDA build of torch and numpy, and nothing else installed: interlace is taken
from src/. Each test file runs in a process of its own, since what a process settles about CUDA, as
whether cuBLAS is deterministic, is settled once. Ranks share a GPU where there are fewer of them.
Writes bench/results/<gpu>/*.json. Without a GPU it says so and exits 0; it exits 2 where there is
one and something is missing.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "gpu"
BENCHES = ("graphs", "imagined")
NEEDED = ("torch", "numpy")
"""What the tests and benches import, beside Python's own."""
OLDEST_PYTHON = (3, 11)
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Read once in a process, before its first matmul."""
DRIVER = Path("/dev/nvidiactl")


def main() -> int:
    problem, hint = missing()
    if problem:
        print(f"gpu-check: {problem}, nothing was run")
        print(f"hint: {hint}")
        return 2 if has_gpu() else 0
    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no CUDA device, nothing was run")
        if has_gpu():
            print("hint: this host has an NVIDIA driver; install a CUDA build of torch")
            return 2
        return 0
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    print(f"gpu-check: {count} x {name}, torch {torch.__version__}", flush=True)
    folder = ROOT / "bench" / "results" / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    failed = [path.stem for path in test_files() if not succeeds(test_command(path))]
    for bench in BENCHES:
        path = folder / f"{bench}.json"
        print(f"gpu-check: bench {bench}", flush=True)
        if succeeds(bench_command(bench, path)):
            print(path.relative_to(ROOT))
        else:
            failed.append(f"bench {bench}")
    print(f"gpu-check: FAILED: {', '.join(failed)}" if failed else "gpu-check: passed")
    return int(bool(failed))


def missing() -> tuple[str, str]:
    """(what this python3 lacks, what to do about it); empty if it has all."""
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return (
            f"this is Python {sys.version.split()[0]}, and interlace needs {oldest}",
            f"make gpu-check PYTHON=python{oldest}",
        )
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not lacking:
        return "", ""
    wanted = " ".join(f"'{requirements()[name]}'" for name in lacking)
    return (
        f"no {' and no '.join(lacking)} in {sys.executable}",
        f"{sys.executable} -m pip install {wanted}",
    )


def requirements() -> dict[str, str]:
    """The project's own, by package: `numpy>=2.0`."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {re.split(r"[^\w-]", text)[0]: text for text in project["dependencies"]}


def has_gpu() -> bool:
    """Whether this host has a driver for NVIDIA's GPUs, as far as can be seen without torch."""
    return DRIVER.exists()


def test_files() -> list[Path]:
    return sorted(TESTS.glob("test_*.py"))


def test_command(path: Path) -> list[str]:
    return [sys.executable, "-m", "unittest", "-v", path.stem]


def bench_command(bench: str, path: Path) -> list[str]:
    code = f"from interlace.bench.{bench} import write; write({str(path)!r})"
    return [sys.executable, "-c", code]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Of a test or bench: the sources of this checkout, and settings that come before torch's."""
    paths = [str(ROOT / "src"), str(TESTS), str(TESTS.parent / "gloo"), str(TESTS.parent)]
    paths.append(given.get("PYTHONPATH", ""))
    return {**SETTINGS, **given, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def succeeds(command: Sequence[str]) -> bool:
    process = subprocess.run(command, env=environment(os.environ), cwd=ROOT, check=False)
    return process.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
