"""Hand-written digits under noise, for models that take it out: scikit-learn's, 1,797 of 8 x 8.

They come with the package (optional extra `images`), so nothing is fetched. Each is made larger to
32 x 32, with values from -1 (paper) to 1 (ink).

Letters: N digits, B micro-batch, H and W positions.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from interlace.errors import InputError

IMAGE = 32
"""Height and width of the pictures."""
HELD_OUT = 97
"""So many digits, the last ones, are never in a training batch."""
_DARKEST = 16
"""The digits' values are counts of dark pixels in fields of 4 x 4."""
_TRAINING, _HELD_OUT = 0, 1

DenoisingBatch = tuple[Tensor, Tensor, Tensor]
"""Noisy images [B, 1, 32, 32], noise levels [B] and clean images [B, 1, 32, 32]; float32."""


class DigitsUnderNoise:
    """Batches that depend on nothing but `seed` and their number.

    noisy = (1 - level) clean + level noise, with normal noise and levels even between 0 and 1.
    Raises InputError without scikit-learn.
    """

    def __init__(self, seed: int = 0) -> None:
        if seed < 0:
            raise InputError(f"seed = {seed} is negative", hint="take 0 or more")
        self._seed = seed
        clean = _pictures()
        self._training, self._held_out = clean[:-HELD_OUT], clean[-HELD_OUT:]

    def micro_batches(self, step: int, count: int, size: int) -> list[DenoisingBatch]:
        """`count` micro-batches of `size` training images for the step of that number, from 0.

        Which images, levels and noise they have follows from seed, step and the numbers of both.
        """
        for name, value, least in (("step", step, 0), ("count", count, 1), ("size", size, 1)):
            if value < least:
                raise InputError(f"{name} = {value} is below {least}", hint=f"raise {name}")
        draw = np.random.default_rng((self._seed, _TRAINING, step))
        found = []
        for _ in range(count):
            picked = draw.integers(len(self._training), size=size)
            levels = draw.random(size, dtype=np.float32)
            found.append(_under_noise(self._training[torch.from_numpy(picked)], levels, draw))
        return found

    def held_out(self, level: float, size: int = HELD_OUT) -> DenoisingBatch:
        """The first `size` digits that are in no training batch, all at one noise level."""
        if not 1 <= size <= HELD_OUT:
            raise InputError(
                f"size = {size}, and {HELD_OUT} digits are held out", hint="take 1 to all of them"
            )
        if not 0 <= level <= 1:
            raise InputError(f"level = {level} is not between 0 and 1", hint="0 is no noise")
        draw = np.random.default_rng((self._seed, _HELD_OUT))
        levels = np.full(size, level, dtype=np.float32)
        return _under_noise(self._held_out[:size], levels, draw)


def _under_noise(
    clean_BHW: Tensor, levels: np.ndarray, draw: np.random.Generator
) -> DenoisingBatch:
    noise = torch.from_numpy(draw.standard_normal(tuple(clean_BHW.shape), dtype=np.float32))
    level_B = torch.from_numpy(levels)
    share = level_B[:, None, None, None]
    return (1 - share) * clean_BHW + share * noise, level_B, clean_BHW


def _pictures() -> Tensor:
    """All digits [N, 1, 32, 32]."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InputError(
            "the digits need the package scikit-learn", hint="pip install 'interlace[images]'"
        ) from error
    fields, _ = load_digits(return_X_y=True)
    small = torch.from_numpy(fields).float().view(-1, 1, 8, 8) * (2 / _DARKEST) - 1
    return F.interpolate(small, size=(IMAGE, IMAGE), mode="bilinear", align_corners=False)
