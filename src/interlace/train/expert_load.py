"""How evenly the tokens of a step are dealt to experts, over all ranks, for metrics."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
    _, *counts = zip(*results, strict=True)
    load_E, peak, dropped = (torch.stack(each).sum(0) for each in counts)
    total = session.total(torch.cat((load_E, peak.view(1), dropped.view(1)))).double()
    load_E, peak, dropped = total[:-2], total[-2], total[-1]
    layers = session.config.model.layers - experts.dense_layers
    return {
        "expert_load": [round(share, 6) for share in (load_E / load_E.sum()).tolist()],
        "expert_imbalance": float(peak * experts.count * layers / load_E.sum()),
        "expert_dropped": float(dropped / load_E.sum()),
    }
