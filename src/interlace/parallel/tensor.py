"""Tensor + sequence parallelism as a DTensor plan (Megatron: arXiv 1909.08053, 2205.05198).

A model names a role for each sub-module; this file says what each role means. Activations in the
residual stream are split along the sequence (dimension 0); inside attention and feed-forward they
are whole and the weights are split. Roles:

    vocabulary_embedding  rows of the table are split; partial rows are reduce-scattered
    sequence_positions    adds learned positions to its part of the sequence
    sequence_norm         works on its part of the sequence; its gradient is summed once a step
    gather_input          the module's input is all-gathered along the sequence, once
    feed_forward          the same, or a layer of experts (`parallel.tensor_layers`)
    column                output features are split
    key_value             as column; with fewer heads than ranks, each rank computes one of them
    head_norm             RMSNorm of each head by itself; its gradient is summed once a step
    row                   input features are split; outputs are reduce-scattered, then get the bias
    vocabulary_head       all-gathers its input, leaves logits split by vocabulary

A `?` behind a pattern says that a model may have no such module.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from interlace.errors import InputError, nearest
from interlace.parallel.local_parts import stored, with_part
from interlace.parallel.tensor_layers import (
    SEQUENCE_DIM,
    BiasedRow,
    HeadNorm,
    SequencePositions,
    SharedHeads,
    VocabularyEmbedding,
    has_experts,
    split_experts,
)

BUNDLED_BYTES = 1 << 20
"""Gradients of up to this many bytes are summed together, since the latency of an all-reduce for
each would cost more than a copy; the size is a choice."""

_OWN_LAYERS = (
    "vocabulary_embedding",
    "sequence_positions",
    "key_value",
    "head_norm",
    "feed_forward",
)
"""Roles that take layers of ours; for the others PyTorch has a style."""


_AS_PYTORCH = {"key_value": "column", "feed_forward": "gather_input"}
"""Roles that are another one where they take no layer of ours."""


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
    """Lay `model` out over a one-dimensional mesh, in place. Every rank must hold equal weights.

    Raises InputError for a plan that does not fit the model."""
    if mesh.size() == 1:
        return
    tied = _tied_pairs(model)
    styles = _styles()
    names = [name for name, _ in model.named_modules() if name]
    for pattern, role in plan.items():
        for name in _planned(names, pattern, role, (*styles, *_OWN_LAYERS)):
            parent, _, child = name.rpartition(".")
            owner = model.get_submodule(parent)
            module = getattr(owner, child)
            replacement = _replacement(module, role, owner, mesh)
            if replacement is not None:
                setattr(owner, child, replacement)
            else:
                style = styles[_AS_PYTORCH.get(role, role)]
                _cut(module, mesh, style)
                parallelize_module(module, mesh, style, src_data_rank=None)
    _own_storage(model)
    for first, second in tied:
        owner, _, attribute = second.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def _cut(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Cut the weights of a linear layer as `style` is about to, which would make a tensor for every
    rank and keep one: on 64 ranks a quarter of the time that a model takes to trace."""
    dim = 0 if isinstance(style, ColwiseParallel) else 1
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)) or type(module) is not nn.Linear:
        return
    for name, parameter in list(module.named_parameters(recurse=False)):
        if dim >= parameter.ndim or parameter.shape[dim] % mesh.size():
            continue
        size = parameter.shape[dim] // mesh.size()
        with torch.no_grad():
            part = torch.narrow_copy(parameter, dim, mesh.get_local_rank() * size, size)
        whole = DTensor.from_local(
            part, mesh, [Shard(dim)],
            run_check=False, shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _planned(names: Sequence[str], pattern: str, role: str, roles: Iterable[str]) -> list[str]:
    """The sub-modules that a pattern names; `*` stands for one part of a name, and a `?` at its end
    says that there may be none."""
    if role not in roles:
        raise InputError(
            f"tensor parallelism knows no role {role!r} (of {pattern!r})", hint=nearest(role, roles)
        )
    full = pattern.removesuffix("?")
    found = [n for n in fnmatch.filter(names, full) if n.count(".") == full.count(".")]
    if not found and full == pattern:
        raise InputError(
            f"no module of the model is named {pattern!r} (role {role!r})",
            hint=nearest(pattern, names),
        )
    return found


def _replacement(
    module: nn.Module, role: str, owner: nn.Module, mesh: DeviceMesh
) -> nn.Module | None:
    """The layer that takes the place of `module`, or None where PyTorch's style does."""
    if role == "vocabulary_embedding":
        assert isinstance(module, nn.Embedding)
        return VocabularyEmbedding(module, mesh)
    if role == "feed_forward" and has_experts(module):
        split_experts(module, mesh)
        return module
    if role == "sequence_positions":
        return SequencePositions(module, mesh)
    if role == "head_norm":
        assert isinstance(module, nn.RMSNorm)
        return HeadNorm(module, mesh)
    if role == "row" and module.bias is not None:
        assert isinstance(module, nn.Linear)
        return BiasedRow(module, mesh)
    if role == "key_value":
        assert isinstance(module, nn.Linear)
        return _shared_heads(module, owner, mesh)
    return None


def _shared_heads(linear: nn.Linear, owner: nn.Module, mesh: DeviceMesh) -> SharedHeads | None:
    """None if heads can be divided among ranks. `owner` knows the `head_size` (in `transformers`
    the `head_dim`)."""
    head_size = getattr(owner, "head_size", None) or owner.head_dim
    assert isinstance(head_size, int)
    heads = linear.out_features // head_size
    if heads % mesh.size() == 0:
        return None
    if mesh.size() % heads:
        raise InputError(
            f"{heads} key and value heads can neither be divided among nor repeated on "
            f"{mesh.size()} tensor-parallel ranks",
            hint="set parallel.tensor to a multiple or a divisor of the number of these heads",
        )
    return SharedHeads(linear, mesh, head_size)


def _own_storage(model: nn.Module) -> None:
    """Give each rank's part a storage of its own: a slice of rows would keep the whole weight."""
    for owner in model.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                continue
            part = stored(parameter)
            if part.untyped_storage().nbytes() == part.numel() * part.element_size():
                continue
            setattr(owner, name, nn.Parameter(with_part(parameter, part.detach().clone())))


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

    Gradients of norms and biases are partial sums over the sequence, those of shared heads over
    ranks. Small ones of one mesh are summed in a single all-reduce, large ones each in place.
    """
    bundles: dict[tuple[DeviceMesh, tuple[int, ...]], list[nn.Parameter]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            continue
        layout = _sharded(parameter).placements
        mesh, axes = gradient.device_mesh, _differing(gradient.placements, layout)
        if not axes:
            continue
        sums = (gradient.placements[i].is_partial("sum") and layout[i].is_replicate() for i in axes)
        if not all(sums):
            parameter.grad = gradient.redistribute(placements=layout)
        elif gradient.nbytes > BUNDLED_BYTES:
            _sum_over(gradient.to_local(), mesh, axes)
            _set_gradient(parameter, gradient.to_local())
        else:
            bundles.setdefault((mesh, axes), []).append(parameter)
    for (mesh, axes), owners in bundles.items():
        locals_ = [_sharded(owner.grad).to_local() for owner in owners]
        flat = torch.cat([gradient.flatten() for gradient in locals_])
        _sum_over(flat, mesh, axes)
        pieces = flat.split([gradient.numel() for gradient in locals_])
        for owner, gradient, piece in zip(owners, locals_, pieces, strict=True):
            _set_gradient(owner, piece.view_as(gradient))


def _differing(one: Sequence[Placement], other: Sequence[Placement]) -> tuple[int, ...]:
    return tuple(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])


def _sum_over(tensor: Tensor, mesh: DeviceMesh, axes: Iterable[int]) -> None:
    for axis in axes:
        dist.all_reduce(tensor, group=mesh.get_group(axis))


def _set_gradient(parameter: nn.Parameter, local: Tensor) -> None:
    laid_out = _sharded(parameter)
    parameter.grad = DTensor.from_local(
        local, laid_out.device_mesh, laid_out.placements,
        run_check=False, shape=laid_out.shape, stride=laid_out.stride(),
    )  # fmt: skip
