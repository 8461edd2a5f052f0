"""Modules drawn at random: the numbers of eager PyTorch, or a refusal by name, and nothing else.
The wide rows draw fifty where `make test` draws twenty.

INTERLACE_EXAMPLES=500 pytest tests/gloo/test_random_modules.py     # drawn anew each time
"""

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, seed, settings
from processes import gloo_group, run_ranks
from random_modules import Chain, case_of, chains
from strange_world import RIGHT, mesh_of, outcomes

from wide import WIDE

EXAMPLES = int(os.environ.get("INTERLACE_EXAMPLES", "0"))
"""0: twenty examples, in wide rows fifty, the same in every run."""


def explored(examples: int, number: int | None) -> dict[str, int]:
    """In a rank: how often each outcome came. Ranks draw the same modules, as they have the same
    seed and judge by what all of them found."""
    torch.set_num_threads(1)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    counts: dict[str, int] = {}
    with gloo_group() as store:
        drawn = iter(range(10**6))

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=number is None,
            suppress_health_check=list(HealthCheck),
        )
        @given(chain=chains())
        def right_or_refused(chain: Chain) -> None:
            case = case_of(chain, world)
            found = outcomes(case, mesh_of(case))
            turn = next(drawn)
            store.set(f"found/{turn}/{rank}", repr((chain, found)))
            of_ranks = [store.get(f"found/{turn}/{each}").decode() for each in range(world)]
            for outcome in found:
                kind = outcome.partition(":")[0]
                counts[kind] = counts.get(kind, 0) + 1
            bad = [each for each in of_ranks if not _fine(each)]
            assert not bad, bad[0]

        if number is not None:
            right_or_refused = seed(number)(right_or_refused)
        right_or_refused()
        dist.barrier()  # rank 0 serves the store: it stays until all have read the last example
    return counts


def _fine(found: str) -> bool:
    return "wrong with" not in found and "crashed with" not in found and "other bits" not in found


@pytest.mark.timeout(240 if not EXAMPLES else 0)
@pytest.mark.parametrize("examples", [20, pytest.param(50, marks=WIDE)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_right_or_refused(ranks: int, examples: int) -> None:
    """Losses and whole gradients of both steps, one strand and two; most modules are taken. The
    wide rows draw more of the same modules."""
    arguments: list[Any] = [EXAMPLES or examples, random.getrandbits(32) if EXAMPLES else None]
    limit_s = 230.0 if not EXAMPLES else 30.0 * EXAMPLES
    results = run_ranks("test_random_modules:explored", ranks, args=arguments, timeout_s=limit_s)
    for result in results:
        print(result.value)
        assert result.value[RIGHT] > 2 * sum(result.value.values()) / 3, result.value
