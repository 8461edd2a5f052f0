"""`make gpu-check`: every GPU test and every GPU bench there is, with plain python3.

Needs a CUDA build of torch 2.11 or newer and nothing else installed: interlace is taken from
src/. Writes bench/results/<gpu>/*.json. Without a GPU it says so and exits 0.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCHES = ("graphs", "imagined")


def main() -> int:
    try:
        import torch
    except ImportError:
        print("gpu-check: no torch in this python3, nothing was run")
        return 0
    if not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no CUDA device, nothing was run")
        return 0
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    folder = ROOT / "bench" / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    print(f"gpu-check: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    tests = [
        sys.executable,
        "-m",
        "unittest",
        "discover",
        "-v",
        "-s",
        "tests/gpu",
        "-t",
        "tests/gpu",
    ]
    failed = subprocess.run(tests, env=environment, cwd=ROOT, check=False).returncode != 0
    for bench in BENCHES:
        path = folder / f"{bench}.json"
        code = f"from interlace.bench.{bench} import write; write({str(path)!r})"
        print(f"gpu-check: bench {bench}")
        done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=False)
        failed |= done.returncode != 0
        if done.returncode == 0:
            print(path.relative_to(ROOT))
    print("gpu-check: FAILED" if failed else "gpu-check: passed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
