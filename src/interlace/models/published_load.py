"""Which experts the tokens of a `transformers` model choose, seen where its own code calls them.

A module of experts of `transformers` (`use_experts_implementation`) is called with the experts of
each token. Its own code keeps them nowhere, so each such module gets a subclass that counts them
on the way in. Counts travel in a list that a forward makes, puts where modules find it, and takes
away again; a trace sees tensors alone.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interlace.models.experts import ExpertLayer


class SeenLoad(NamedTuple):
    """The load of experts, over the layers that a forward has run so far."""

    load: Tensor
    """Tokens that chose each expert number: [E], int64."""
    peak: Tensor
    """The most tokens that chose one expert of one layer, a scalar."""


class _Collector:
    """Where modules of experts find the list of the forward that runs; None outside of one."""

    seen: list[SeenLoad] | None = None


_active_collector = _Collector()
"""Its name is known to `graphs.trace_errors`: forwards set it and put it back."""


class CountedExperts(nn.Module):
    """Experts that add what they are asked for to the list of the forward."""

    counted: int
    """Experts of the layer, those of other ranks too."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[N, D], [N, K], [N, K] -> [N, D], as the class below; a number beyond the last expert
        counts for none."""
        if _active_collector.seen is not None:
            ids = top_k_index.detach().flatten()
            zeros = torch.zeros(self.counted + 1, dtype=torch.int64, device=ids.device)
            load = zeros.scatter_add(0, ids, torch.ones_like(ids))[: self.counted]
            # Added up layer by layer, so that deep models are traced by a few layers.
            if not _active_collector.seen:
                _active_collector.seen.append(SeenLoad(load, load.max()))
            else:
                before = _active_collector.seen.pop()
                peak = torch.maximum(before.peak, load.max())
                _active_collector.seen.append(SeenLoad(before.load + load, peak))
        found: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
        return found


def count_experts(model: nn.Module) -> tuple[int, int]:
    """Let the layers of experts of `model` count, in place: (experts of a layer, layers). (0, 0) if
    it has none, or layers with different numbers of them, of which a sum would say nothing."""
    modules = [module for module in model.modules() if hasattr(module, "is_transposed")]
    counts = {id(module): _count(module) for module in modules}
    if len(set(counts.values())) != 1 or None in counts.values():
        return 0, 0
    for module in modules:
        base = type(module)
        members = {"__doc__": base.__doc__, "counted": counts[id(module)]}
        module.__class__ = type(base.__name__, (CountedExperts, base), members)
    return counts[id(modules[0])] or 0, len(modules)


def _count(module: Any) -> int | None:
    if isinstance(module, ExpertLayer):
        return module.count
    weight = getattr(module, "down_proj", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() > 2 else None


def begin() -> None:
    """Before a forward whose experts are to be seen."""
    _active_collector.seen = []


def finish() -> list[SeenLoad]:
    """What was seen since `begin`: one, or nothing."""
    seen = _active_collector.seen or []
    _active_collector.seen = None
    return seen
