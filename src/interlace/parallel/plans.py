"""Lay a `transformers` model out by the tensor-parallel plan that it publishes.

The plan (`base_model_tp_plan`, and `_tp_plan` of the model) gives a style by module name:

    colwise                  output features are split
    colwise_gather_output    the same, then gathered (colwise_rep in transformers 4)
    rowwise                  input features are split; outputs are summed over ranks
    rowwise_split_input      the same, of an input that is whole (rowwise_rep)
    embedding_rowwise        the vocabulary is split; embeddings are summed over ranks
    replicated_with_grad_allreduce, sequence_parallel    whole; nothing to do, see below

Activations between layers are whole on every rank, as the model's own code expects. The output
head's logits stay split by vocabulary, for `parallel.tensor.loss_context`. Gradients follow from
what the model does, not from the plan: `parallel.split_values` watches one forward.
"""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import InputError
from interlace.parallel.local_parts import (
    Column,
    Entered,
    Row,
    VocabularyRows,
    gather_features,
    lay_out,
    specialise,
    split_features_of,
)
from interlace.parallel.split_values import COLUMNS, ROWS, SplitValues

_ROLES = {
    "colwise": "column",
    "colwise_gather_output": "column_gathered",
    "colwise_rep": "column_gathered",
    "rowwise": "row",
    "rowwise_split_input": "row_splits_input",
    "rowwise_rep": "row_splits_input",
    "embedding_rowwise": "vocabulary",
}
"""What each style of a published plan makes of a layer. Several styles are one role under the names
of `transformers` 4 and 5."""
_WHOLE = frozenset({"replicated_with_grad_allreduce", "sequence_parallel", "replicate"})
"""Styles of a published plan that leave a module whole on every rank."""
_FINISH: Mapping[str, Callable[[Tensor, DeviceMesh], Tensor] | None] = {
    "column": None,
    "column_gathered": gather_features,
    "head": split_features_of,
}
"""What each role of a column layer does with this rank's slice of its output; None: nothing."""
_PROBE_TOKENS = 8
"""Length of the sequence with which one forward is watched; a choice: any few tokens pass through
every layer, and eight cost nothing."""


def apply_published_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lay a `transformers` causal language model out over a one-dimensional mesh, in place.

    All parameters become DTensors. Every rank must hold equal weights. Raises InputError if the
    model publishes no plan, or one that cannot be used on so many ranks.
    """
    if mesh.size() == 1:
        return
    roles = roles_of(model)
    _check_sizes(model, roles, mesh.size())
    values = SplitValues(model, roles)
    device = next(model.parameters()).device
    values.watch(torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=device))
    shared = values.shared_inputs()
    lay_out(model, mesh, _shards(roles), values.partial)
    _specialise(model, mesh, roles, shared)


def roles_of(model: nn.Module) -> dict[str, str]:
    """The role of every module that the published plan lays out, by qualified name."""
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if not any(style in _ROLES for style in plan.values()):
        raise InputError(
            f"{type(model).__name__} publishes no tensor-parallel plan",
            hint="set parallel.tensor to 1 and share its work by parallel.data_shard",
        )
    roles = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in [*(name for name, _ in model.named_modules()), *parameters]:
        style = plan.get(name) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or style in _WHOLE:
            continue
        if style not in _ROLES or name in parameters:
            raise InputError(
                f"the plan of {type(model).__name__} gives {name!r} the style {style!r}, which "
                f"is not supported",
                hint="set parallel.tensor to 1; styles that work: "
                + ", ".join(sorted([*_ROLES, *_WHOLE])),
            )
        roles[name] = _ROLES[style]
    return _with_head(model, roles)


def _with_head(model: nn.Module, roles: dict[str, str]) -> dict[str, str]:
    """The output head leaves its logits split; a head and an embedding that share their weight
    are split alike."""
    head, embedding = (
        _name_of(model, getattr(model, getter)())
        for getter in ("get_output_embeddings", "get_input_embeddings")
    )
    if head and roles.get(head) in ("column", "column_gathered"):
        roles = roles | {head: "head"}
    if not (head and embedding) or _weight(model, head) is not _weight(model, embedding):
        return roles
    if "head" in roles.values() or embedding in roles:
        roles = roles | {head: "head", embedding: "vocabulary"}
    return roles


def _name_of(model: nn.Module, module: nn.Module | None) -> str:
    return next((name for name, found in model.named_modules() if found is module), "")


def _weight(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(f"{name}.weight")


def _check_sizes(model: nn.Module, roles: Mapping[str, str], ranks: int) -> None:
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", ranks)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for name, role in roles.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Embedding if role == "vocabulary" else nn.Linear):
            raise InputError(
                f"{name!r} is a {type(module).__name__}, and role {role!r} needs a plain "
                f"{'embedding' if role == 'vocabulary' else 'linear layer'}",
                hint="set parallel.tensor to 1",
            )
        size = module.weight.shape[1 if role in ROWS else 0]
        what = "input features" if role in ROWS else "rows"
        leaf = name.rpartition(".")[2]
        if role == "column" and leaf in ("q_proj", "k_proj", "v_proj"):
            size, what = (heads, "heads") if leaf == "q_proj" else (kv_heads, "key/value heads")
        if size % ranks:
            raise InputError(
                f"the {size} {what} of {name!r} cannot be divided among parallel.tensor = "
                f"{ranks} ranks",
                hint=f"set parallel.tensor to a divisor of {size}",
            )


def _shards(roles: Mapping[str, str]) -> dict[str, int]:
    """The dimension along which each split parameter is cut. A row layer's bias is whole: it is
    added once, after the sum."""
    shards = {}
    for name, role in roles.items():
        shards[f"{name}.weight"] = 1 if role in ROWS else 0
        if role in COLUMNS:
            shards[f"{name}.bias"] = 0
    return shards


def _specialise(
    model: nn.Module, mesh: DeviceMesh, roles: Mapping[str, str], shared: Mapping[str, set[str]]
) -> None:
    served = set().union(*shared.values())
    for name in shared:
        specialise(model.get_submodule(name), (Entered,), {"tensor_mesh": mesh})
    for name, role in roles.items():
        module = model.get_submodule(name)
        if role == "vocabulary":
            _split_vocabulary(module, mesh)
        elif role in ROWS:
            members = {"tensor_mesh": mesh, "splits_input": role == "row_splits_input"}
            specialise(module, (Row,), members)
        else:
            finish = _FINISH[role]
            members = {
                "tensor_mesh": mesh,
                "enters": name not in served,
                "finish": finish and staticmethod(finish),
            }
            specialise(module, (Column,), members)


def _split_vocabulary(module: nn.Module, mesh: DeviceMesh) -> None:
    """An embedding of this rank's rows; the row that gets no gradient is on one rank only."""
    assert isinstance(module, nn.Embedding)
    rows = module.weight.shape[0]
    first = mesh.get_local_rank() * rows
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - first if first <= padding < first + rows else None
    specialise(module, (VocabularyRows,), {"tensor_mesh": mesh, "first_row": first})
