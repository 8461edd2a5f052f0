"""What a device needs before a step runs on it: to be the current one, and orders of addition that
do not change from run to run.
"""

import ctypes
import os
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.errors import InputError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that sets the workspaces of cuBLAS."""
CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")
"""The values with which cuBLAS gives the same bits on every stream."""
NCCL_VARIABLE = "NCCL_ALGO"
"""Environment variable that says which algorithms NCCL may use."""
NCCL_DETERMINISTIC = "^NVLS,NVLSTree"
"""Value of NCCL_ALGO that leaves out the algorithms in which the switch adds: it does so in the
order in which data arrive."""
_ADDING = ("allreduce", "reducescatter")
"""Collectives that add, by their names in NCCL_ALGO."""


def check_current(device: torch.device) -> None:
    """Refuse a CUDA device that is not the current one. NCCL, small agreements and streams all
    take the current device, so every rank of a host would use GPU 0. Raises InputError."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return
    raise InputError(
        f"the tensors are on {device}, and the current device is "
        f"cuda:{torch.cuda.current_device()}",
        hint=f"call torch.cuda.set_device({device.index}) before torch.distributed."
        "init_process_group",
    )


def nondeterminism(device: torch.device) -> tuple[str, ...]:
    """Why the bits of a step on `device` may differ from run to run, and so between one strand and
    two; empty if nothing is known that makes them differ."""
    if device.type != "cuda":
        return ()
    found = []
    if not torch.are_deterministic_algorithms_enabled() or (
        torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        found.append(
            "torch.use_deterministic_algorithms(True) is not set, and the backward pass of "
            "attention and of embeddings adds in an order that changes"
        )
    workspace = os.environ.get(CUBLAS_VARIABLE, "")
    if workspace not in CUBLAS_DETERMINISTIC:
        found.append(
            f"{CUBLAS_VARIABLE}={workspace} is none of {', '.join(CUBLAS_DETERMINISTIC)}, and "
            "cuBLAS may choose another kernel on another stream"
        )
    algorithms = _variable(NCCL_VARIABLE)
    if uses_nccl() and switch_adds(algorithms):
        found.append(
            f"{NCCL_VARIABLE}={algorithms} lets an NVLink switch add (NVLS), in an order that "
            "changes"
        )
    return tuple(found)


def warn_of_other_bits(reasons: Sequence[str]) -> None:
    """Say once, on the first rank, why one strand and two may differ, if there are `reasons`."""
    if reasons and (not dist.is_initialized() or dist.get_rank() == 0):
        text = "one strand and two may differ in their last bits: " + "; ".join(reasons)
        warnings.warn(text, stacklevel=3)


def switch_adds(algorithms: str) -> bool:
    """Whether a value of NCCL_ALGO leaves NVLS to all-reduce or reduce-scatter. It is a list of
    algorithms, those left out after a `^`, or one such list for each of some functions."""
    lists = {}
    for part in algorithms.lower().replace(" ", "").split(";"):
        function, _, names = part.rpartition(":")
        lists[function] = names
    return any(_has_nvls(lists.get(function, lists.get("", ""))) for function in _ADDING)


def _has_nvls(names: str) -> bool:
    if names.startswith("^"):
        return "nvls" not in names[1:].split(",")
    return not names or any(name.startswith("nvls") for name in names.split(","))


def uses_nccl() -> bool:
    """Whether several ranks send device memory through NCCL."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return "cuda:nccl" in dist.get_backend_config().split(",")


def _variable(name: str) -> str:
    """An environment variable as C sees it: torch sets NCCL_ALGO there when it makes the first
    group, and `os.environ` holds what was set when Python started."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(name.encode())
    return value.decode() if value else ""
