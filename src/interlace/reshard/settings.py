"""What a user may set."""

from dataclasses import dataclass

import torch.distributed as dist

from interlace.errors import InputError
from interlace.hardware.cluster import Cluster
from interlace.hardware.topology import Topology
from interlace.reshard.messages import ALIGNMENT_BYTES

_PIECES = 4
"""Parts of the buffer memory, of which a message takes one at most, so that several are under way;
a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a resharding is planned and run. Alike on all ranks."""

    topology: Topology | None = None
    """Hosts and speeds; default: from `cluster`, or else from the host names of the ranks."""
    cluster: Cluster | None = None
    """A cluster file (`interlace.hardware.cluster.load_cluster`)."""
    measure: bool = False
    """Measure the rates between two hosts and inside one (8 MiB messages) before planning."""
    strategy: str = "auto"
    order: str = "auto"
    chunk_bytes: int | None = None
    """Size of pipelined chunks; None leaves it to the planner."""
    time_limit_s: float = 1.0
    """Seconds that a search for the order may take."""
    seed: int = 0
    memory_bytes: int = 256 << 20
    """Most memory of message buffers on each rank; pieces that lie apart in memory need them."""
    outstanding: int = 64
    """Messages that a rank may have under way: with too few, all may be to one slow receiver."""
    timeout_s: float = 60.0
    """How long a rank waits for others to make the same call."""
    name: str = ""
    """Name of the plan. Ranks that make plans of equal tensors in different orders are found out
    by these names alone."""
    group: dist.ProcessGroup | None = None
    """Has all ranks of both meshes; default: the default group."""
    watch: bool = True
    """Notice within 5 s that a rank died or stalled. Off where a `Watchdog` is entered already."""

    def __post_init__(self) -> None:
        for name, least in (("memory_bytes", 4096), ("outstanding", 1)):
            if getattr(self, name) < least:
                raise InputError(
                    f"{name} = {getattr(self, name)}", hint=f"set {name} to {least} or more"
                )
        if not self.timeout_s > 0:
            raise InputError(f"timeout_s = {self.timeout_s}", hint="set timeout_s above 0")

    @property
    def message_bytes(self) -> int:
        """Most bytes of one message."""
        return self.memory_bytes // _PIECES // ALIGNMENT_BYTES * ALIGNMENT_BYTES
