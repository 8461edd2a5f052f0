"""How evenly the tokens of a step are dealt to experts, over all ranks: said, and balanced."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interlace.models.routers import Router, updated_bias
from interlace.train.session import Session


def load_values(session: Session, results: Sequence[tuple[Tensor, ...]]) -> dict[str, Any]:
    """What metrics say of a step, of which `results` are those of this rank's micro-batches; empty
    for a model without experts. Collective.

    `expert_load`: the share of all choices that went to each expert number, in all layers together.
    `expert_imbalance`: the most tokens that chose one expert of one layer, over the mean of all, in
    the mean of micro-batches. `expert_dropped`: the share of choices over their expert's capacity.
    """
    experts = session.config.model.experts
    if not experts.count or not results or not results[0]:
        return {}
    counts = [own[1:4] for own in results]
    load_E, peak, dropped = (torch.stack(each).sum(0) for each in zip(*counts, strict=True))
    total = session.total(torch.cat((load_E, peak.view(1), dropped.view(1)))).double()
    load_E, peak, dropped = total[:-2], total[-2], total[-1]
    layers = session.config.model.layers - experts.dense_layers
    return {
        "expert_load": [round(share, 6) for share in (load_E / load_E.sum()).tolist()],
        "expert_imbalance": float(peak * experts.count * layers / load_E.sum()),
        "expert_dropped": float(dropped / load_E.sum()),
    }


def move_biases(session: Session, results: Sequence[tuple[Tensor, ...]]) -> None:
    """Move the biases by which routers choose, where these balance (`routers.updated_bias`), by the
    load of a step of which `results` are those of this rank's micro-batches. Collective."""
    experts = session.config.model.experts
    if experts.balance != "bias":
        return
    load_LE = session.total(torch.stack([by_layer for *_, by_layer in results]).sum(0))
    biases = router_biases(session.weights.module).values()
    for bias, load_E in zip(biases, load_LE, strict=True):
        bias.copy_(updated_bias(bias, load_E, experts.bias_speed))


def router_biases(module: nn.Module) -> dict[str, Tensor]:
    """The biases that steps move, by name, layer by layer."""
    return {
        f"{name}.bias": router.bias
        for name, router in module.named_modules()
        if isinstance(router, Router) and router.bias is not None
    }
