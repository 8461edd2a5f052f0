"""Experts of a `transformers` model as layers that can be dealt to ranks, by its published plan.

The plan (`base_model_ep_plan` of its configuration, `ep_plan` of the model) gives a style by name:

    ep_dispatch_experts    a module of experts, which gets tokens [N, D], the experts of each and
                           their gates
    grouped_gemm           a weight of such a module, with a slice along dimension 0 for each expert

It says what lies where, and that rows travel; how they travel is our dispatch (`models.experts`),
so that their exchanges are in the plan of a step. The router, norms and attention stay the model's
own code, and so does what an expert does between its matmuls (`_apply_gate`).
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from interlace.errors import InputError
from interlace.experts.grouped import grouped_matmul
from interlace.models.experts import ExpertLayer, RowExchange
from interlace.parallel.local_parts import specialise

_DISPATCH, _DEALT = "ep_dispatch_experts", "grouped_gemm"
_HINT = "set parallel.expert to 1, and share the work by parallel.data_shard"
_CANNOT = {
    "has_bias": "biases",
    "has_post_expert_norm": "a norm behind each expert",
}
"""What experts may have that our dispatch does not compute, by the flag that says so."""


class PublishedExperts(ExpertLayer):
    """Experts of `transformers` behind our dispatch, computed from their own weights."""

    has_gate: bool
    is_transposed: bool
    act_fn: Any
    _apply_gate: Any
    gate_up_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[N, D], [N, K], [N, K] -> [N, D], as their own forward."""
        return self.dispatched(hidden_states, top_k_index, top_k_weights)

    def on_rows(self, rows: Tensor, counts: Tensor) -> Tensor:
        """As in `ExpertLayer`."""
        entry = self.gate_up_proj if self.has_gate else self.up_proj
        inner = self._by_expert(rows, entry, counts)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        return self._by_expert(inner, self.down_proj, counts)

    def _by_expert(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        if self.is_transposed:  # [L, D, F]
            weight = weight.transpose(1, 2)
        return grouped_matmul(rows, weight, counts, self.exchange.ranks)


def adopt_published_experts(model: nn.Module) -> None:
    """Give every module that the plan of a `transformers` model dispatches to our dispatch, in
    place; all experts stay where they are. A module without such a plan is left as it is.

    Raises InputError for a plan with another style, and for experts that are not computed as ours.
    """
    for prefix, owner in _owners(model):
        modules = dict(owner.named_modules())
        styles = _styles(owner, f"{type(owner).__name__}{f' ({prefix})' if prefix else ''}")
        for name, style in styles.items():
            if style == _DISPATCH and not isinstance(modules[name], ExpertLayer):
                _adopt(modules[name], name, styles)


def _owners(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost modules that publish a plan, by name."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(not known or name.startswith(f"{known}.") for known, _ in found)
        if not inside and getattr(module, "_ep_plan", None):
            found.append((name, module))
    return found


def _styles(model: Any, whose: str) -> dict[str, str]:
    """The style of every module and parameter that the plan names."""
    plan: Mapping[str, str] = model._ep_plan
    named = [name for name, _ in model.named_modules()]
    named += [name for name, _ in model.named_parameters()]
    found = {}
    for name in named:
        style = plan.get(name) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None:
            continue
        if style not in (_DISPATCH, _DEALT):
            raise InputError(
                f"the expert-parallel plan of {whose} gives {name!r} the style {style!r}, which is "
                "not supported",
                hint=f"{_HINT}; styles that work: {_DISPATCH}, {_DEALT}",
            )
        found[name] = style
    return found


def _adopt(module: Any, name: str, styles: Mapping[str, str]) -> None:
    if not hasattr(module, "is_transposed"):
        raise InputError(
            f"{name!r} is a {type(module).__name__}, whose experts are not computed by grouped "
            "matmuls of transformers (use_experts_implementation)",
            hint=_HINT,
        )
    for flag, what in _CANNOT.items():
        if getattr(module, flag):
            raise InputError(
                f"the experts of {name!r} have {what}, and those that are dealt to ranks have none",
                hint=_HINT,
            )
    weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    own = dict(module.named_parameters())
    if sorted(own) != sorted(weights) or any(f"{name}.{each}" not in styles for each in own):
        raise InputError(
            f"{name!r} has the parameters {', '.join(own)}, and those that are dealt to ranks are "
            f"{' and '.join(weights)}, with the style {_DEALT}",
            hint=_HINT,
        )
    specialise(module, (PublishedExperts,), {})
    module.count, module.exchange = own["down_proj"].shape[0], RowExchange()
