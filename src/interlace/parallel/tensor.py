"""Tensor + sequence parallelism as a DTensor plan (Megatron: arXiv 1909.08053, 2205.05198).

A model names a role for each sub-module; this file says what each role means. Activations in the
residual stream are split along the sequence (dimension 0); inside attention and feed-forward they
are whole and the weights are split. Roles:

    vocabulary_embedding  rows of the table are split; partial rows are reduce-scattered
    sequence_norm         works on its part of the sequence; its gradient is summed once a step
    gather_input          the module's input is all-gathered along the sequence, once
    column                output features are split
    row                   input features are split; outputs are reduce-scattered
    vocabulary_head       all-gathers its input, leaves logits split by vocabulary
"""

import fnmatch
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

SEQUENCE_DIM = 0


class VocabularyEmbedding(nn.Module):
    """An embedding whose rows are split over ranks: each rank looks up its own tokens.

    DTensor's own row-wise embedding gives a gradient of the full table on every rank; here the
    gradient is of the rank's rows only.
    """

    def __init__(self, table: nn.Embedding, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        weight = distribute_tensor(table.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        self.weight = nn.Parameter(weight)

    def forward(self, tokens_SB: Tensor) -> Tensor:
        """[S, B] -> this rank's part of the sequence, [S / ranks, B, D]."""
        rows = _sharded(self.weight).to_local()
        local_SB = tokens_SB - self.mesh.get_local_rank() * rows.shape[0]
        foreign_SB = (local_SB < 0) | (local_SB >= rows.shape[0])
        x_SBD = F.embedding(local_SB.masked_fill(foreign_SB, 0), rows)
        x_SBD = x_SBD.masked_fill(foreign_SB.unsqueeze(-1), 0)
        whole = DTensor.from_local(x_SBD, self.mesh, [Partial()], run_check=False)
        return whole.redistribute(placements=[Shard(SEQUENCE_DIM)]).to_local()


def _styles() -> dict[str, ParallelStyle]:
    sequence, whole = Shard(SEQUENCE_DIM), Replicate()
    return {
        "sequence_norm": SequenceParallel(sequence_dim=SEQUENCE_DIM),
        "gather_input": PrepareModuleInput(
            input_layouts=(sequence,), desired_input_layouts=(whole,)
        ),
        "column": ColwiseParallel(),
        "row": RowwiseParallel(output_layouts=sequence),
        "vocabulary_head": ColwiseParallel(
            input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False
        ),
    }


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Lay `model` out over a one-dimensional mesh, in place. Every rank must hold equal weights."""
    if mesh.size() == 1:
        return
    tied = _tied_pairs(model)
    styles = _styles()
    names = [name for name, _ in model.named_modules() if name]
    for pattern, role in plan.items():
        for name in fnmatch.filter(names, pattern):
            if pattern.count(".") != name.count("."):
                continue
            parent, _, child = name.rpartition(".")
            owner = model.get_submodule(parent)
            module = getattr(owner, child)
            if role == "vocabulary_embedding":
                setattr(owner, child, VocabularyEmbedding(module, mesh))
            else:
                parallelize_module(module, mesh, styles[role], src_data_rank=None)
    _own_storage(model)
    for first, second in tied:
        owner, _, attribute = second.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def _own_storage(model: nn.Module) -> None:
    """Give each rank's part a storage of its own: a slice of rows would keep the whole weight."""
    for owner in model.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                continue
            part = parameter.to_local().detach()
            if part.untyped_storage().nbytes() == part.numel() * part.element_size():
                continue
            whole = DTensor.from_local(
                part.clone(), parameter.device_mesh, parameter.placements,
                run_check=False, shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
            setattr(owner, name, nn.Parameter(whole))


def _tied_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Names of parameters that are the same object: (kept name, other name)."""
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            pairs.append((first[id(parameter)], name))
        first.setdefault(id(parameter), name)
    return pairs


def _sharded(tensor: Tensor | None) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


def loss_context(mesh: DeviceMesh) -> AbstractContextManager[None]:
    """Holds while the loss and its backward run or are traced: softmax over sharded vocabulary."""
    return loss_parallel() if mesh.size() > 1 else nullcontext()


def finish_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Bring every gradient to its parameter's layout, once per step.

    Gradients of norms are partial sums over the sequence: all partial gradients of one mesh
    are summed in a single all-reduce, since each is a few kilobytes and latency dominates.
    """
    partial: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            continue
        layout = _sharded(parameter).placements
        if gradient.placements == layout:
            continue
        sums = all(isinstance(p, Partial) and p.reduce_op == "sum" for p in gradient.placements)
        if sums and all(isinstance(p, Replicate) for p in layout):
            partial.setdefault(gradient.device_mesh, []).append(parameter)
        else:
            parameter.grad = gradient.redistribute(placements=layout)
    for mesh, owners in partial.items():
        locals_ = [_sharded(owner.grad).to_local() for owner in owners]
        flat = torch.cat([gradient.flatten() for gradient in locals_])
        total = DTensor.from_local(flat, mesh, [Partial()] * mesh.ndim, run_check=False)
        summed = total.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
        pieces = summed.split([gradient.numel() for gradient in locals_])
        for owner, gradient, piece in zip(owners, locals_, pieces, strict=True):
            owner.grad = DTensor.from_local(
                piece.view_as(gradient), mesh, _sharded(owner).placements, run_check=False
            )
