"""This machine: what its processor is called, what measured times are valid for, how fast it is."""

import hashlib
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch


def machine_id(device_type: str, link: str) -> str:
    """What measured times are valid for: processor or GPU, threads, torch, link."""
    name = torch.cuda.get_device_name() if device_type == "cuda" else processor_name()
    parts = (name, str(torch.get_num_threads()), str(torch.__version__), link)
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def processor_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure_this_machine() -> tuple[float, float]:
    """(flop/s of a 1024 x 1024 float32 matmul, byte/s of a 64 MiB copy), one thread, ~0.2 s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.randn(1024, 1024)
        big = torch.empty(16 * 2**20)
        flops = 2 * 1024**3 / _best_seconds(lambda: a @ a)
        copied = 2 * big.numel() * big.element_size() / _best_seconds(big.clone)
    finally:
        torch.set_num_threads(threads)
    return flops, copied


def _best_seconds(call: Callable[[], object], repeats: int = 4) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
