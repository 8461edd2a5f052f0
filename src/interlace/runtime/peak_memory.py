"""Peak memory of one step, as it is and not as it is counted.

On the CPU two figures: bytes that the C allocator has handed out, looked at after every operator,
and the process's peak of resident memory, which also sees what an operator frees before it ends
but is blurred by memory that the allocator keeps. On CUDA: the caching allocator's own peak.
"""

import ctypes
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from interlace.graphs.torch_private import AsyncCollectiveTensor, TorchDispatchMode

_STATUS = Path("/proc/self/status")
"""File of Linux with this process's resident memory and its peak (proc(5))."""
_CLEAR = Path("/proc/self/clear_refs")
"""File of Linux by which a process resets that peak (proc(5))."""
_RESET_PEAK = "5"
"""Written to clear_refs: the peak of resident memory becomes its present value (proc(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Bytes by which memory grew above its start while something ran; None: cannot be seen here."""

    allocated_bytes: int | None
    resident_bytes: int | None


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later; all in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def allocated_bytes() -> int | None:
    """Bytes in use in all of glibc's heaps and mappings; None with another C library."""
    call = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if call is None:
        return None
    call.restype = _Mallinfo
    info = call()
    return int(info.uordblks + info.hblkhd)


def resident_bytes(field: str = "VmRSS") -> int | None:
    """Resident memory of this process, or its peak (`VmHWM`); None where there is no /proc."""
    if not _STATUS.exists():
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


class _AfterEachOperator(TorchDispatchMode):
    """Calls `look` after every operator, in the thread that runs them."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operators on DTensor come back here as operators on their local tensors."""
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.look()
        return result


def measure_growth(run: Callable[[], object], device: torch.device) -> Growth:
    """Call `run` once and say by how much memory grew meanwhile. It runs slower than usual."""
    gc.collect()
    if device.type == "cuda":
        return _on_cuda(run, device)
    before = allocated_bytes()
    if before is None:
        resident = _resident(run)
        return Growth(allocated_bytes=None, resident_bytes=resident)
    peak = before

    def look() -> None:
        nonlocal peak
        peak = max(peak, allocated_bytes() or 0)

    with _AfterEachOperator(look):
        resident = _resident(run)
    return Growth(allocated_bytes=peak - before, resident_bytes=resident)


def _resident(run: Callable[[], object]) -> int | None:
    """Growth of resident memory; free memory goes back to the system first, so that it cannot
    be used again unseen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    can_reset = _reset_peak()
    before = resident_bytes()
    run()
    peak = resident_bytes("VmHWM")
    return peak - before if can_reset and peak is not None and before is not None else None


def _reset_peak() -> bool:
    """Whether the kernel lets a process reset its own peak; some sandboxes do not."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _on_cuda(run: Callable[[], object], device: torch.device) -> Growth:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return Growth(allocated_bytes=peak - before, resident_bytes=None)
