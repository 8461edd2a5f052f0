"""One rank of a training job, from the process group to the last line."""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch.distributed as dist

from interlace.checkpoint.request import claim_together
from interlace.config import RunConfig
from interlace.errors import InputError, complain
from interlace.ranks.attempt import leave
from interlace.ranks.process_group import process_group
from interlace.ranks.signals import StopFlag
from interlace.start_progress import shown
from interlace.train.loop import Trainer
from interlace.train.opening import STAGES, open_session
from interlace.train.rank_job import job_of_rank
from interlace.train.same_run import check_built, check_software

SAME_MISTAKE_S = 0.5
"""Less than the 0.75 s after which the watchdog ends a rank whose peer has failed."""


def main(config: RunConfig) -> int:
    """Train as this rank. Returns the exit code; raises InterlaceError on failure."""
    return run_rank(config, lambda stop: _train(config, stop))


def run_rank(config: RunConfig, work: Callable[[StopFlag], int]) -> int:
    """Join the process group, watched by the others, and do `work`; returns what that returns.

    Raises InterlaceError on failure; a mistake that all ranks see is told by the first one only.
    """
    joined = process_group(
        config.link,
        config.watchdog,
        deterministic=config.train.deterministic,
        process_ends=True,
    )
    with StopFlag() as stop, joined as store:
        rank = dist.get_rank()
        code = _agreed_work(config, work, stop, store)
    leave(store, rank, config.watchdog.end_s)
    return code


def _agreed_work(
    config: RunConfig, work: Callable[[StopFlag], int], stop: StopFlag, store: dist.Store
) -> int:
    check_software(config)
    try:
        return work(stop)
    except InputError as error:
        if _first_rank_says(error, store):
            sys.exit(error.exit_code)
        raise


def _train(config: RunConfig, stop: StopFlag) -> int:
    job = job_of_rank(config)
    with claim_together(job.asked) as claims:
        if claims.finished:
            _say_finished(config.output.directory, claims.finished)
            return 0
        with shown(STAGES) if job.rank == 0 else nullcontext():
            session = open_session(job)
            check_built(session)
        Trainer(session, claims).run(stop)
    return 0


def _say_finished(directory: str, step: int) -> None:
    if dist.get_rank() == 0:
        print(
            f"{directory} holds this run, finished after step {step}: nothing is left to do\n"
            f"hint: set train.steps above {step} to go on; `interlace report {directory}` draws it",
            file=sys.stderr,
            flush=True,
        )


def _first_rank_says(error: InputError, store: dist.Store) -> bool:
    """Whether the first rank reports the same mistake, so that this rank can stay quiet.

    The first rank has told the user before it tells the others: as soon as one of those has ended,
    whoever started the ranks ends the first one too.
    """
    key = "interlace/input_error"
    if dist.get_rank() == 0:
        complain(error.message, hint=error.hint)
        error.told = True
        store.set(key, error.message)
        return False
    deadline = time.monotonic() + SAME_MISTAKE_S
    while time.monotonic() < deadline:
        if store.check([key]):
            return store.get(key).decode() == error.message
        time.sleep(0.02)
    return False
