"""A causal language model of `transformers`, as it is, from a folder with its config.json."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from interlace.errors import InputError
from interlace.models import published_load

CAUSAL = "interlace_causal"
"""Name of an attention implementation: that of `sdpa`, without masks. While it is traced,
`transformers` writes every mask out, which costs the fast kernels; a causal one needs none."""
_BY_LENGTH = ("longrope", "dynamic")
"""Kinds of rotary positions whose frequencies depend on the length of a sequence."""


class FixedPositions(nn.Module):
    """Rotary positions as a table, which its own code has made, for one length.

    Long and dynamic rotary positions (`rope_type` longrope and dynamic) take other frequencies
    beyond the length that a model was first trained on, and find that length in the values of
    positions, which a traced graph does not know. Where every sequence has the same length, so have
    their tables.
    """

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


class TransformersLoss(nn.Module):
    """Mean cross-entropy in nats of a `transformers` model over a micro-batch.

    In training, a model with experts whose config.json sets `output_router_logits` adds its
    auxiliary loss, times its own `router_aux_loss_coef`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.experts, self.expert_layers = published_load.count_experts(model)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor | tuple[Tensor, ...]:
        """A scalar, equal on all ranks of a tensor-parallel group, and of a model with experts
        what `NextTokenLoss` says beside it: the cross-entropy alone, then the load and the peak of
        its experts, and dropped choices, of which there are none. Logits may be a DTensor that is
        split by vocabulary, under `parallel.tensor.loss_context`."""
        if self.experts:
            published_load.begin()
        found = self.model(input_ids=tokens_BS, use_cache=False)
        seen = published_load.finish() if self.experts else []
        logits_BSV = found.logits
        wide = torch.promote_types(logits_BSV.dtype, torch.float32)
        loss = F.cross_entropy(logits_BSV.flatten(0, 1).to(wide), targets_BS.flatten())
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        cross_entropy = loss.detach()
        auxiliary = getattr(found, "aux_loss", None)
        if self.training and auxiliary is not None:
            config: Any = self.model.config
            loss = loss + config.router_aux_loss_coef * auxiliary
        if not seen:
            return loss
        (load_E, peak), *_ = seen
        return loss, cross_entropy, load_E, peak, torch.zeros_like(peak)


def build(folder: str, *, vocab_size: int, sequence_length: int) -> nn.Module:
    """The model of `folder`, in float32: with the weights of its safetensors files if it has any,
    else with weights drawn from torch's global generator. Under fake tensors nothing is read.
    Where rotary positions depend on the length of a sequence, it takes that length only.

    Raises InputError for a folder or model that cannot be used, for fewer than `vocab_size`
    tokens or `sequence_length` positions, and for weights in pickles. No code of the folder runs.
    """
    path = Path(folder)
    config = _config(path)
    _check(config, folder, vocab_size, sequence_length)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": _attention(config, sequence_length),
    }
    if _experts(config.to_dict()):
        # The code of its own loops over the experts that were met, and cannot be traced.
        options["experts_implementation"] = "grouped_mm"
    try:
        if has_weights(path) and type(torch.empty(0)) is Tensor:  # else tensors are fake
            options |= {"local_files_only": True, "use_safetensors": True}
            model = AutoModelForCausalLM.from_pretrained(path, config=config, **options)
            return _ready(_in_own_memory(model), config, sequence_length)
        model = AutoModelForCausalLM.from_config(config, **options)
        return _ready(model, config, sequence_length)
    except (ValueError, OSError) as error:
        raise InputError(
            f"model.config = {folder!r}: {type(config).__name__} makes no causal language model: "
            f"{_first_line(error)}",
            hint="choose the configuration of a causal language model that this version of "
            "transformers knows",
        ) from error


def _ready(model: nn.Module, config: Any, sequence_length: int) -> nn.Module:
    """The model in training mode, with rotary positions of that length where they depend on it.
    One that gives the logits of its routers has hung hooks into itself, which it does at the first
    forward, behind a lock that cannot be traced."""
    length = sequence_length if fix_positions(model, sequence_length) else 1
    if getattr(config, "output_router_logits", False):
        with torch.no_grad():
            model.eval()(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    return model.train()


def _in_own_memory(model: nn.Module) -> nn.Module:
    """The model with parameters in memory that torch allocated: those that it read lie in mapped
    files, whose memory cannot be given back where ranks share weights or have a stage of them."""
    for parameter in model.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
    return model


def expert_counts(folder: str) -> str:
    """Experts as config.json in `folder` names them, as in `num_local_experts = 8`; empty for a
    model without any. Raises InputError without config.json."""
    return ", ".join(_experts(_config(Path(folder)).to_dict()))


def _experts(values: dict[Any, Any]) -> list[str]:
    """`name = number` for every number of experts in `values` and in the tables within it."""
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _experts(value)
        elif "expert" in str(name) and type(value) is int and value > 1:
            found.append(f"{name} = {value}")
    return found


def published_sizes(folder: str) -> tuple[str, int, int]:
    """(kind, layers, width) as config.json in `folder` says. Raises InputError without one."""
    config = _config(Path(folder))
    return config.model_type, config.num_hidden_layers, config.hidden_size


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights. Raises InputError if they are pickles only."""
    if any(folder.glob("*.safetensors*")):
        return True
    pickles = sorted(folder.glob("*.bin"))
    if pickles:
        raise InputError(
            f"model.config = {str(folder)!r} holds its weights in {pickles[0].name}, a pickle, "
            "which runs code when it is read",
            hint="save the model as safetensors (save_pretrained does)",
        )
    return False


def _config(path: Path) -> Any:
    file = path / "config.json"
    if not file.is_file():
        raise InputError(
            f"model.config = {str(path)!r} has no config.json",
            hint="set model.config to the folder of a transformers model",
        )
    try:
        from transformers import AutoConfig  # noqa: PLC0415 - takes seconds
    except ImportError as error:
        raise InputError(
            'model.source = "hugging_face" needs the package transformers',
            hint="pip install 'interlace[hugging-face]'",
        ) from error
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise InputError(
            f"{str(file)!r} cannot be used: {_first_line(error)}",
            hint="it must name a model_type that this version of transformers knows itself",
        ) from error
    config.use_cache = False
    return config


def _check(config: Any, folder: str, vocab_size: int, sequence_length: int) -> None:
    rows = getattr(config, "vocab_size", vocab_size)
    if rows < vocab_size:
        raise InputError(
            f"the model of {folder!r} knows {rows} tokens, and the tokenizer has {vocab_size}",
            hint="set data.tokenizer to the tokenizer.json of the model",
        )
    positions = getattr(config, "max_position_embeddings", sequence_length)
    if sequence_length > positions:
        raise InputError(
            f"data.sequence_length = {sequence_length} is longer than the {positions} positions "
            f"of the model of {folder!r}",
            hint=f"set data.sequence_length to {positions} or less",
        )


def _attention(config: Any, sequence_length: int) -> str:
    """The implementation of attention: without masks where every layer is plainly causal."""
    if getattr(config, "attn_logit_softcapping", None):
        return "eager"  # sdpa knows no cap
    window = getattr(config, "sliding_window", None)
    windowed = window is not None and window < sequence_length
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if windowed or chunked or not getattr(config, "is_causal", True):
        return "sdpa"
    from transformers import AttentionInterface  # noqa: PLC0415 - takes seconds
    from transformers.integrations.sdpa_attention import (  # noqa: PLC0415
        sdpa_attention_forward,
    )

    AttentionInterface.register(CAUSAL, sdpa_attention_forward)
    return CAUSAL


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
