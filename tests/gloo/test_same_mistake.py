"""A mistake that all ranks see is told by the first, before anybody can end that rank."""

import os
import signal
from typing import Any

from processes import gloo_group, run_ranks

MISTAKE = "train.steps is -1"


class EndsAtOnce:
    """A store by which the first rank, as it tells the others, brings about its own end."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        os.kill(os.getpid(), signal.SIGKILL)


def mistaken() -> None:
    from interlace.errors import InputError
    from interlace.train.worker import _first_rank_says

    with gloo_group() as store:
        _first_rank_says(InputError(MISTAKE, hint="set it above 0"), EndsAtOnce(store))


def test_the_first_rank_has_told_before_the_others_end() -> None:
    (first,) = run_ranks("test_same_mistake:mistaken", 1, check=False)
    assert first.returncode == -signal.SIGKILL
    assert first.stderr == f"error: {MISTAKE}\nhint: set it above 0\n"
