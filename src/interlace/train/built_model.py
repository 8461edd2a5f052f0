"""The module that one rank trains: built, laid out over the meshes, with its loss."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.models import model_file
from interlace.models.hugging_face import load_weights
from interlace.models.moe import RoutedLogits
from interlace.models.transformers_model import TransformersLoss, build, has_weights
from interlace.parallel.context import apply_context_parallel
from interlace.parallel.expert import apply_expert_parallel
from interlace.parallel.meshes import EXPERT_AXIS, Meshes
from interlace.parallel.plans import apply_published_plan
from interlace.parallel.tensor import apply_tensor_parallel
from interlace.train.weights import cast_parameters


def build_module(
    config: RunConfig,
    meshes: Meshes,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """`module(tokens, targets) -> loss` of this rank, with fresh weights from torch's global
    generator. Data-parallel ranks hold whole weights. Under fake tensors it takes no memory.

    Parameters of another `dtype` than float32 are cast before they are laid out: as DTensors they
    would each be taken apart and put together again."""
    if config.model.source == "hugging_face":
        return _transformers_module(config, meshes, vocab_size, device, dtype)
    files = model_file(config.model.architecture)
    with device:  # fake tensors cannot be moved
        model = files.build(config.model, vocab_size, config.data.sequence_length)
    _cast(model, dtype)
    method = config.parallel.context_method
    apply_context_parallel(
        model, meshes.context, files.CONTEXT_PLAN, method, config.data.sequence_length
    )
    if meshes.tensor.size() > 1 and not files.TENSOR_PLAN:
        raise InputError(
            f"parallel.tensor = {meshes.tensor.size()}, and the TENSOR_PLAN of "
            f"model.architecture = {config.model.architecture!r} splits nothing",
            hint="give its sub-modules roles (interlace/parallel/tensor.py), or set "
            "parallel.tensor to 1",
        )
    folder = Path(config.model.config)
    loads = config.model.config and has_weights(folder) and not is_fake()
    merged = config.parallel.expert_sends == "merged"
    if meshes.experts is not None:
        if loads:  # whole, and then a rank keeps its experts
            load_weights(model, folder)
        experts = meshes.experts[EXPERT_AXIS]
        apply_expert_parallel(model, experts, meshes.counts, merged=merged)
    apply_tensor_parallel(model, meshes.tensor, files.TENSOR_PLAN)
    if loads and meshes.experts is None:
        load_weights(model, folder)
    return NextTokenLoss(model, config.model.experts.auxiliary_weight)


def is_fake() -> bool:
    """Whether tensors made now have no memory."""
    return type(torch.empty(0)) is not Tensor


def vocabulary(config: RunConfig, tokens: int) -> int:
    """Rows of the embedding for a tokenizer of `tokens` tokens. Raises InputError where
    `model.vocab_size` has fewer."""
    if config.model.vocab_size and config.model.vocab_size < tokens:
        raise InputError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the tokenizer's "
            f"{tokens} tokens",
            hint=f"set model.vocab_size to {tokens} or more, or to 0",
        )
    return config.model.vocab_size or tokens


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        cast_parameters(model, dtype)


def _transformers_module(
    config: RunConfig, meshes: Meshes, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    length, merged = config.data.sequence_length, config.parallel.expert_sends == "merged"
    with device:  # fake tensors cannot be moved
        model = build(config.model.config, vocab_size=vocab_size, sequence_length=length)
    _cast(model, dtype)
    if meshes.experts is not None:
        experts = meshes.experts[EXPERT_AXIS]
        apply_expert_parallel(model, experts, meshes.counts, merged=merged)
    apply_published_plan(model, meshes.tensor)
    return TransformersLoss(model)


class NextTokenLoss(nn.Module):
    """Mean cross-entropy in nats over a micro-batch; this is what gets traced as one chunk.

    In training, the auxiliary loss of a model with experts is added, times `auxiliary_weight`.
    """

    def __init__(self, model: nn.Module, auxiliary_weight: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.auxiliary_weight = auxiliary_weight

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor | tuple[Tensor, ...]:
        """A scalar, equal on all ranks of a tensor-parallel group, and of a model with experts
        the cross-entropy alone, then the load, peak and dropped choices of its experts, and
        the load by layer where biases balance it.

        Logits that come as a vocabulary-sharded DTensor are never gathered: the caller holds
        `parallel.tensor.loss_context`, under which softmax reduces across ranks.
        """
        found = self.model(tokens_BS)
        logits_SBV = found.logits if isinstance(found, RoutedLogits) else found
        wide = torch.promote_types(logits_SBV.dtype, torch.float32)
        loss = F.cross_entropy(logits_SBV.flatten(0, 1).to(wide), targets_BS.t().flatten())
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        cross_entropy = loss.detach()
        if self.training and isinstance(found, RoutedLogits) and found.auxiliary_loss is not None:
            loss = loss + self.auxiliary_weight * found.auxiliary_loss
        if isinstance(found, RoutedLogits):
            results = (loss, cross_entropy, found.load, found.peak, found.dropped)
            return results if found.by_layer is None else (*results, found.by_layer)
        return loss
