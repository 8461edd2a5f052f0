"""One rank of a training job, from the process group to the last line."""

import sys
import time
from collections.abc import Callable

import torch.distributed as dist

from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.runtime.agreement import check_agreement, environment_fields
from interlace.runtime.signals import StopFlag
from interlace.runtime.watchdog import Watchdog
from interlace.train.build import published_shape
from interlace.train.loop import Trainer, claim_directory
from interlace.train.opening import open_session
from interlace.train.session import Session, process_group

SAME_MISTAKE_S = 0.5
"""Less than the 0.75 s after which the watchdog ends a rank whose peer has failed."""


def main(config: RunConfig) -> int:
    """Train as this rank. Returns the exit code; raises InterlaceError on failure."""
    return run_rank(config, lambda stop: _train(config, stop))


def run_rank(config: RunConfig, work: Callable[[StopFlag], int]) -> int:
    """Join the process group, watched by the others, and do `work`; returns what that returns.

    Raises InterlaceError on failure; a mistake that all ranks see is told by the first one only.
    """
    with StopFlag() as stop, process_group(config) as store:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1 or not config.watchdog.enabled:
            return _agreed_work(config, work, stop, store)
        with Watchdog(
            store,
            rank,
            world_size,
            heartbeat_s=config.watchdog.heartbeat_s,
            dead_after_s=config.watchdog.dead_after_s,
        ):
            return _agreed_work(config, work, stop, store)


def _agreed_work(
    config: RunConfig, work: Callable[[StopFlag], int], stop: StopFlag, store: dist.Store
) -> int:
    # Before anything is built: with other shapes on one rank the first collective would hang.
    check_agreement(_configuration(config) | environment_fields())
    try:
        return work(stop)
    except InputError as error:
        if _first_rank_says(error, store):
            sys.exit(error.exit_code)
        raise


def _train(config: RunConfig, stop: StopFlag) -> int:
    if dist.get_rank() == 0:
        claim_directory(published_shape(config))  # a checkpoint holds the shape in full
    session = open_session(config)
    check_agreement(_built(session))
    Trainer(session).run(stop)
    return 0


def _first_rank_says(error: InputError, store: dist.Store) -> bool:
    """Whether the first rank reports the same mistake, so that this rank can stay quiet."""
    key = "interlace/input_error"
    if dist.get_rank() == 0:
        store.set(key, error.message)
        return False
    deadline = time.monotonic() + SAME_MISTAKE_S
    while time.monotonic() < deadline:
        if store.check([key]):
            return store.get(key).decode() == error.message
        time.sleep(0.02)
    return False


def _configuration(config: RunConfig) -> dict[str, str]:
    """Every value by its name in the run file; only where files are written may differ."""
    fields = {}
    for table, values in config.as_dict().items():
        if isinstance(values, dict) and table != "output":
            fields |= {f"{table}.{key}": str(value) for key, value in values.items()}
        elif table != "output":
            fields[table] = str(values)
    return fields


def _built(session: Session) -> dict[str, str]:
    """What must be equal on all ranks before the first step, besides the configuration."""
    fields = {"data": session.dataset.digest}
    if session.strands is not None:
        fields["graph"] = session.strands.digest
    return fields | {f"plan of mode {mode}": plan.digest for mode, plan in session.plans.items()}
