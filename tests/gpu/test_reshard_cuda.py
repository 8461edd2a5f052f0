"""Resharding between ranks of NCCL gives exactly the slices of the whole tensor.

The random layouts of `tests/gloo`, and skipped where what those import is not installed.
"""

import importlib.util
import unittest

import nccl_ranks
import torch
from nccl_ranks import nccl_group

LACKING = [name for name in ("pytest",) if not importlib.util.find_spec(name)]
RANKS, LIMIT_S = 4, 300
MOVES, PLANS = 150, 30


def random_moves() -> list[str]:
    """A rank: tensors one by one, then plans of several. Raises at the first that is wrong."""
    from test_reshard import moved

    with nccl_group():
        seen = moved("cuda", MOVES, PLANS)
    print(seen, flush=True)
    return [f"no {kind} came up" for kind, count in seen.items() if not count]


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
@unittest.skipIf(bool(LACKING), f"not installed: {', '.join(LACKING)}")
class ReshardOnCuda(unittest.TestCase):
    """Ranks of NCCL, as torchrun starts them."""

    def test_random_moves(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "random_moves", RANKS, LIMIT_S)


if __name__ == "__main__":
    nccl_ranks.main({"random_moves": random_moves})
