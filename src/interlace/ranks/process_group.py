"""The process group of a rank: joined with all others, who watch each other from then on; and
groups of some ranks."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from interlace.config import LinkConfig, WatchdogConfig
from interlace.errors import InputError
from interlace.lab.links import emulated_backend
from interlace.ranks.attempt import meet, meeting_bound
from interlace.ranks.device import BACKENDS, NCCL_TIMEOUT, claim_device
from interlace.ranks.watchdog import Watchdog

_REAL_LINK = LinkConfig()
"""Nothing is emulated."""
_USUAL_LIMITS = WatchdogConfig()
"""Those of a run file that says nothing of `[watchdog]`."""


_OWN_COUNTS = 1 << 20
"""From where groups are counted that some ranks make: more than any job makes of all ranks."""


def group_of_some(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group that these ranks make without the others; collective on them.

    From torch 2.15 on a rank counts the groups that it makes so among those that all make, and all
    later ones are named by that count: ranks that made unequal numbers would wait for each other
    for ever. So the count is put back, and these groups are named by counts of their own.
    """
    torch_groups = dist.distributed_c10d
    world, ranks = torch_groups._world, sorted(ranks)
    names, count = set(world.pg_names.values()), world.group_count
    try:
        for world.group_count in range(_OWN_COUNTS, _OWN_COUNTS + len(names) + 1):
            if torch_groups._hash_ranks_to_str(ranks) not in names:
                break
        group = dist.new_group(ranks, use_local_synchronization=True)
    finally:
        world.group_count = count
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def process_group(
    link: LinkConfig = _REAL_LINK,
    limits: WatchdogConfig = _USUAL_LIMITS,
    *,
    deterministic: bool = True,
    process_ends: bool = False,
) -> Iterator[dist.Store]:
    """The default process group of this attempt of the job, and a store of its own; ranks watch
    each other meanwhile.

    `deterministic` asks for kernels and collectives that give the same bits each time, and
    `process_ends` says that the process ends right after, which rank 0 then sees to. Raises
    PeerError if another rank is at fault, InputError for a `link` that this machine cannot emulate.
    """
    device = claim_device(deterministic=deterministic)
    backend = BACKENDS[device.type]
    if (rate := link.bits_per_s) is not None:
        if device.type == "cuda":
            raise InputError(
                "link.rate emulates a link between CPU processes, and this machine has a GPU",
                hint="set CUDA_VISIBLE_DEVICES= to train on the CPU, or link.rate to empty",
            )
        backend = emulated_backend(rate, link.latency_us)
    if "RANK" not in os.environ:  # a single process needs no launcher
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)
    with meeting_bound(limits.start_s):
        store, rank, world_size = meet(limits.start_s)
    watchdog = _watchdog(limits, store, rank, world_size, process_ends=process_ends)
    build = partial(_build_group, backend, device, store, rank, world_size)
    if watchdog is None:
        build()
        try:
            yield store
        finally:
            dist.destroy_process_group()
        return
    with watchdog:
        with watchdog.bounded("building its process group", limits.start_s):
            build()
        try:
            with watchdog.reporting():
                yield store
        finally:
            with watchdog.bounded("taking down its process group", limits.end_s):
                dist.destroy_process_group()


def _build_group(
    backend: str, device: torch.device, store: dist.Store, rank: int, world_size: int
) -> None:
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("default", store),
        rank=rank,
        world_size=world_size,
        timeout=NCCL_TIMEOUT if device.type == "cuda" else None,
    )


def _watchdog(
    limits: WatchdogConfig, store: dist.Store, rank: int, world_size: int, *, process_ends: bool
) -> Watchdog | None:
    """What watches the ranks from here to their end; None for one rank, or if that is off."""
    if world_size == 1 or not limits.enabled:
        return None
    return Watchdog(
        store,
        rank,
        world_size,
        heartbeat_s=limits.heartbeat_s,
        dead_after_s=limits.dead_after_s,
        busy_s=limits.busy_s,
        start_s=limits.start_s,
        end_s=limits.end_s,
        process_ends=process_ends,
    )
