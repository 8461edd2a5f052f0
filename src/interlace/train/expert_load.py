"""How evenly the tokens of a step are dealt to experts, over all ranks: said, and balanced."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interlace.experts.grouped import ADD_WEIGHT_GRADIENT, MATMUL, WEIGHT_GRADIENT
from interlace.ir.graph import COMPUTE_LANE
from interlace.ir.timeline import WAIT, Timeline
from interlace.models.routers import Router, updated_bias
from interlace.models.transformers_model import TransformersLoss
from interlace.ranks.small_collectives import mean
from interlace.step import Step
from interlace.train.session import Session
from interlace.train.step_runners import StepRunner, from_last_stage, gives_results

_MATMULS = {str(each) for each in (MATMUL, WEIGHT_GRADIENT, ADD_WEIGHT_GRADIENT)}
"""What experts compute, as graphs name it."""


def load_values(session: Session, results: Sequence[tuple[Tensor, ...]]) -> dict[str, Any]:
    """What metrics say of a step, of which `results` are those of this rank's micro-batches; empty
    for a model without experts. Collective.

    `expert_load`: the share of all choices that went to each expert number, in all layers together.
    `expert_imbalance`: the most tokens that chose one expert of one layer, over the mean of all, in
    the mean of micro-batches. `expert_dropped`: the share of choices over their expert's capacity.
    `expert_rank_imbalance`, where experts are dealt to ranks: rows of the rank that gets most over
    the mean of all, of all layers and micro-batches together; of one layer it may be more.
    """
    count, layers = _experts(session)
    if not count or not _says_load(session, results):
        return {}
    counts = [
        torch.cat((load_E, peak.view(1), over.view(1))) for _, load_E, peak, over, *_ in results
    ]
    total = _total(session, counts, (count + 2,)).double()
    load_E, peak, dropped = total[:-2], total[-2], total[-1]
    ranks = session.config.parallel.expert
    of_rank = load_E.view(ranks, -1).sum(1)
    dealt = {"expert_rank_imbalance": float(of_rank.max() / of_rank.mean())} if ranks > 1 else {}
    return dealt | {
        "expert_load": [round(share, 6) for share in (load_E / load_E.sum()).tolist()],
        "expert_imbalance": float(peak * count * layers / load_E.sum()),
        "expert_dropped": float(dropped / load_E.sum()),
    }


def skew_values(
    session: Session, runner: StepRunner, timeline: Timeline, values: Mapping[str, Any]
) -> dict[str, float]:
    """What uneven load costs in a recorded step: empty where experts lie on one rank. Collective.

    `expert_compute_ms`: time in the matmuls of experts, in the mean of all ranks.
    `expert_skew_ms`: how much longer the rank with the most rows computes than the mean, for which
    the others wait, by `expert_rank_imbalance` of `values`; at least that, as layers are not
    uneven alike.
    """
    uneven = values.get("expert_rank_imbalance")
    if uneven is None or not isinstance(runner, Step):
        return {}
    operators = {
        op.id
        for graph in runner.strands.op_graphs.values()
        for op in graph.operators
        if op.target in _MATMULS
    }
    spans = [s for s in timeline.spans if s.lane == COMPUTE_LANE and s.kind != WAIT]
    own_ns = sum(span.duration_ns for span in spans if span.name in operators)
    mean_ms = mean({"compute": own_ns})["compute"] / 1e6
    return {"expert_compute_ms": mean_ms, "expert_skew_ms": (uneven - 1) * mean_ms}


def move_biases(session: Session, results: Sequence[tuple[Tensor, ...]]) -> None:
    """Move the biases by which routers choose, where these balance (`routers.updated_bias`), by the
    load of a step of which `results` are those of this rank's micro-batches. Collective."""
    experts = session.config.model.experts
    if experts.balance != "bias":
        return
    layers = session.config.model.layers - experts.dense_layers
    load_LE = _total(session, [by_layer for *_, by_layer in results], (layers, experts.count))
    biases = router_biases(session.weights.module).values()
    for bias, load_E in zip(biases, load_LE, strict=True):
        bias.copy_(updated_bias(bias, load_E, experts.bias_speed))


def _experts(session: Session) -> tuple[int, int]:
    """(experts of a layer, layers that have any); 0 experts where a model counts none."""
    model, module = session.config.model, session.weights.module
    if isinstance(module, TransformersLoss):
        return module.experts, module.expert_layers
    return model.experts.count, model.layers - model.experts.dense_layers


def _says_load(session: Session, results: Sequence[tuple[Tensor, ...]]) -> bool:
    """Whether the model does, which one of a user's own need not; alike on all ranks."""
    if session.stages is not None and session.main is not None:
        return gives_results(session.main)
    return bool(results and results[0])


def _total(session: Session, own: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The sum of what micro-batches of all ranks have, which on ranks of other stages of a pipeline
    than the last one is nothing; on all ranks."""
    total = session.total(torch.stack(list(own)).sum(0)) if own else None
    if session.stages is None or session.main is None:
        assert total is not None
        return total
    like = torch.zeros(shape, dtype=torch.int64, device=session.device)
    return from_last_stage(session.main, total, like, "the load of experts")


def router_biases(module: nn.Module) -> dict[str, Tensor]:
    """The biases that steps move, by name, layer by layer."""
    return {
        f"{name}.bias": router.bias
        for name, router in module.named_modules()
        if isinstance(router, Router) and router.bias is not None
    }
