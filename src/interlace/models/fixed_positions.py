"""Rotary positions of `transformers` that are chosen by the length of a sequence, for one length.

Long and dynamic rotary positions (`rope_type` longrope and dynamic) take other frequencies beyond
the length that a model was first trained on, and find that length in the values of positions, which
a traced graph does not know. Where every sequence has the same length, so have their tables.
"""

from typing import Any

import torch
from torch import Tensor, nn

from interlace.errors import InputError

_BY_LENGTH = ("longrope", "dynamic")


class FixedPositions(nn.Module):
    """Rotary positions as a table, which its own code has made."""

    cos_table: Tensor
    sin_table: Tensor

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(cosines, sines) of positions 0, 1, ... in the dtype of `x`, [1, S, size of a head].
        Raises InputError for sequences of another length."""
        length, asked = self.cos_table.shape[1], position_ids.shape[-1]
        if asked != length:
            raise InputError(
                f"a sequence has {asked} positions, and rotary positions were made for {length}",
                hint=f"give the model sequences of {length} tokens, for which it was built",
            )
        return self.cos_table.to(x.dtype), self.sin_table.to(x.dtype)


def fix_positions(model: nn.Module, length: int) -> bool:
    """Make tables of the rotary positions of `model` that depend on the length, in place; whether
    there are any. They are no part of its state. Under fake tensors tables have no values."""
    found = [m for m in model.modules() if getattr(m, "rope_type", None) in _BY_LENGTH]
    for module in found:
        cos, sin = _tables(module, length)
        module.register_buffer("cos_table", cos, persistent=False)
        module.register_buffer("sin_table", sin, persistent=False)
        base = type(module)
        members = {"__doc__": base.__doc__}
        module.__class__ = type(base.__name__, (FixedPositions, base), members)
    return bool(found)


def _tables(module: Any, length: int) -> tuple[Tensor, Tensor]:
    x = module.inv_freq.new_empty(0)
    if type(x) is not Tensor:  # a fake one: its own code would ask for values
        shape = 1, length, 2 * module.inv_freq.shape[0]
        return module.inv_freq.new_empty(shape), module.inv_freq.new_empty(shape)
    positions = torch.arange(length, device=x.device).unsqueeze(0)
    return module(x, positions)
