"""One rank of a training job, from the process group to the last line."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from interlace.checkpoint.request import finished_step
from interlace.claims import Claims
from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.ranks.attempt import leave
from interlace.ranks.signals import StopFlag
from interlace.ranks.small_collectives import broadcast_text
from interlace.train.built_model import published_shape
from interlace.train.loop import Trainer, claim_directory, join_claims
from interlace.train.opening import open_session
from interlace.train.same_run import check_built, check_software
from interlace.train.session import process_group

SAME_MISTAKE_S = 0.5
"""Less than the 0.75 s after which the watchdog ends a rank whose peer has failed."""


def main(config: RunConfig) -> int:
    """Train as this rank. Returns the exit code; raises InterlaceError on failure."""
    return run_rank(config, lambda stop: _train(config, stop))


def run_rank(config: RunConfig, work: Callable[[StopFlag], int]) -> int:
    """Join the process group, watched by the others, and do `work`; returns what that returns.

    Raises InterlaceError on failure; a mistake that all ranks see is told by the first one only.
    """
    with StopFlag() as stop, process_group(config, process_ends=True) as store:
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
    claimed, finished = _claimed(config)
    with claimed as claims:
        if finished:
            _say_finished(config, finished)
            return 0
        session = open_session(config)
        check_built(session)
        Trainer(session, claims).run(stop)
    return 0


def _say_finished(config: RunConfig, step: int) -> None:
    if dist.get_rank() == 0:
        directory = config.output.directory
        print(
            f"{directory} holds this run, finished after step {step}: nothing is left to do\n"
            f"hint: set train.steps above {step} to go on; `interlace report {directory}` draws it",
            file=sys.stderr,
            flush=True,
        )


def _claimed(config: RunConfig) -> tuple[Claims, int]:
    """The directories of this run, claimed by the first rank, and the step after which it has
    finished already, or 0. Collective; a refusal is raised on every rank alike."""
    claims: Claims | None = None
    answer: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            claims = claim_directory(published_shape(config))  # a checkpoint holds it in full
            epoch = claims.checkpoints.epoch if claims.checkpoints else 0
            answer = {"token": claims.output.token, "epoch": epoch}
            answer |= {"finished": finished_step(config)}
        except InputError as error:
            answer = {"message": error.message, "hint": error.hint}
    answer = json.loads(broadcast_text(json.dumps(answer)))
    if "message" in answer:
        raise InputError(answer["message"], hint=answer["hint"])
    claims = claims or join_claims(config, answer["token"], answer["epoch"])
    return claims, answer["finished"]


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
