"""Ranks that exchange by NCCL, each on a GPU of its own, or all on the one that there is.

NCCL refuses two ranks of one host on one GPU. Where there are fewer GPUs than ranks, each rank
gives NCCL another name of its host, and they exchange by sockets of this host. Their kernels take
turns on the device, which is slow: it shows what is right, and nothing of speed.
"""

import datetime
import faulthandler
import os
import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

_SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}
"""For the same bits each time."""
_APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
_TIMEOUT = datetime.timedelta(seconds=120)
_LIMIT_S = float(os.environ.get("RANK_LIMIT_S", "240"))
"""Seconds after which a rank prints where its threads are, and ends."""


def have_own_gpus() -> None:
    """In a rank, before its process group: NCCL may take the GPU that torch's launcher numbers."""
    os.environ.update(_SETTINGS)
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        os.environ.update(_APART, NCCL_HOSTID=f"rank{os.environ['RANK']}")


@contextmanager
def nccl_group(*, one_communicator: bool = False) -> Iterator[None]:
    """In a rank: the process group of a user's program on GPUs, with deterministic kernels. With
    `one_communicator` it is made at once, as with `device_id`, and all sends and receives of a rank
    share a stream; else each pair of ranks has its own."""
    have_own_gpus()
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", timeout=_TIMEOUT, device_id=device if one_communicator else None
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(test: unittest.TestCase, file: str, name: str, ranks: int, limit_s: float) -> None:
    """Start `file NAME` as torchrun does; the test fails unless all ranks end with 0."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={ranks}", file, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit_s,
        check=False,
    )
    test.assertEqual(done.returncode, 0, done.stdout.decode(errors="replace")[-8000:])


def main(children: Mapping[str, Callable[[], list[str]]]) -> None:
    """A rank: calls what it is told to, and ends with 1 if that finds a fault."""
    faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
    faults = children[sys.argv[1]]()
    print("\n".join(faults), flush=True)
    os._exit(bool(faults))  # threads of NCCL may outlive a group that was given up
