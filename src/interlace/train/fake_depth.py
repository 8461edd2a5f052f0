"""A deep model of fake tensors, of which a few blocks are built and the others are copies.

Blocks of our own models differ in their weights alone, and fake weights have no values: what a copy
lacks is nothing that a trace could see.
"""

import copy
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from interlace.config import RunConfig
from interlace.model_config import Architecture


def with_few_layers(config: RunConfig) -> RunConfig:
    """The run whose model has one block of each kind; the run itself where a file of the user's own
    or of `transformers` says what a block is."""
    model = config.model
    if model.source == "hugging_face" or model.architecture not in get_args(Architecture):
        return config
    kinds = model.experts.dense_layers + 1  # the first layers may have no experts
    return replace(config, model=replace(model, layers=min(model.layers, kinds)))


def deepen(model: nn.Module, layers: int) -> None:
    """Give a model of ours so many blocks, in place: copies of its last one, behind it."""
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    for _ in range(len(blocks), layers):
        blocks.append(_copy(blocks[-1]))


def _copy(module: nn.Module) -> nn.Module:
    """The same code on tensors of its own."""
    twin = copy.copy(module)
    twin._parameters = {name: _parameter(each) for name, each in module._parameters.items()}
    twin._buffers = {
        name: None if each is None else torch.empty_like(each)
        for name, each in module._buffers.items()
    }
    twin._modules = {
        name: None if each is None else _copy(each) for name, each in module._modules.items()
    }
    return twin


def _parameter(given: nn.Parameter | None) -> nn.Parameter | None:
    if given is None:
        return None
    return nn.Parameter(_empty_like(given), requires_grad=given.requires_grad)


def _empty_like(given: Tensor) -> Tensor:
    if not isinstance(given, DTensor):
        return torch.empty_like(given)
    # By the protocol of tensors that wrap others: half the time of `from_local`.
    names, how = given.__tensor_flatten__()
    parts = {name: getattr(given, name) for name in names}
    for name, part in parts.items():
        if isinstance(part, Tensor):  # the other one is the mesh
            parts[name] = torch.empty_like(part)
    return given.__tensor_unflatten__(parts, how, given.size(), given.stride())
