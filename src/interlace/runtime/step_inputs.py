"""What a user gives to `compile_step` and to a step, checked before anything is built or run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from interlace.errors import InputError
from interlace.parallel.meshes import REPLICATE_AXIS
from interlace.ranks.determinism import check_current
from interlace.runtime.executor import Batch
from interlace.runtime.traced_strands import Strands


def check_module(module: nn.Module) -> None:
    """Raise InputError for what is no module."""
    if not isinstance(module, nn.Module):
        raise InputError(
            f"module is a {type(module).__name__}, no nn.Module",
            hint="give the module that holds the parameters; loss_fn(module, *batch) calls it",
        )


def check_wrappers(module: nn.Module, *, fsdp: bool = False) -> None:
    """Raise InputError if a sub-module is wrapped by what works through autograd's hooks, and with
    `fsdp` is not under `fully_shard` either."""
    refused = (DistributedDataParallel,) if fsdp else (FSDPModule, DistributedDataParallel)
    for name, each in module.named_modules():
        if isinstance(each, refused):
            by = "fully_shard" if isinstance(each, FSDPModule) else "DistributedDataParallel"
            hint = f"leave {by} out, and name the axis of these ranks {REPLICATE_AXIS} in mesh: "
            hint += "gradients are averaged over it"
            if fsdp:
                hint = "put the wrapper around the whole module, or " + hint
            raise InputError(
                f"{name or 'the module'} is under {by}, which exchanges gradients by hooks of "
                "autograd, and a traced step has no autograd",
                hint=hint,
            )


def check_loss(strands: Strands) -> None:
    """Raise InputError unless the traced loss is one number that depends on a parameter."""
    loss = strands.loss.meta["val"]
    if loss.shape or not loss.is_floating_point():
        raise InputError(
            f"loss_fn gives {_described(loss)}, not one number",
            hint="return the mean of the losses",
        )
    if not strands.parameters:
        raise InputError(
            "the loss depends on no parameter that requires a gradient",
            hint="check loss_fn, requires_grad and torch.no_grad",
        )


def check_example(example: Batch) -> None:
    """Raise InputError unless these, the tensors of a batch, are plain ones on the current
    device."""
    if not example:
        raise InputError(
            "example_inputs holds no tensor", hint="give one batch, as in (images, labels)"
        )
    for index, value in enumerate(example):
        strided = value.layout == torch.strided
        if not strided or isinstance(value, DTensor) or value.requires_grad:
            what = f"of layout {value.layout}"
            if strided:
                what = "a DTensor" if isinstance(value, DTensor) else "one that needs a gradient"
            raise InputError(
                f"tensor {index} of example_inputs is {what}, not a plain tensor",
                hint="pass plain tensors; what is trained belongs into the module",
            )
    check_current(example[0].device)


def check_batches(micro_batches: Sequence[Batch], example: Batch) -> None:
    """Raise InputError unless each micro-batch has the shapes, dtypes and device of `example`."""
    if not micro_batches:
        raise InputError("there is no micro-batch", hint="pass a list of at least two")
    wanted = [_described(tensor) for tensor in example]
    for index, batch in enumerate(micro_batches):
        if not isinstance(batch, (tuple, list)):
            raise InputError(
                f"micro-batch {index} is a {type(batch).__name__}, not a tuple of tensors",
                hint="pass a list of batches, each as example_inputs was",
            )
        found = [_described(tensor) for tensor in batch]
        if found != wanted:
            raise InputError(
                f"micro-batch {index} is ({', '.join(found)}), and the step was compiled for "
                f"({', '.join(wanted)})",
                hint="make all micro-batches alike (drop_last=True), or compile another step",
            )


def _described(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} on {tensor.device}"
