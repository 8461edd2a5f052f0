"""Every private torch API that Interlace uses, in one place. Tested with torch 2.11 to 2.13.

    _dynamo.functional_export.dynamo_graph_capture_for_export   module -> fx module, no guards
    _functorch.aot_autograd.aot_export_joint_with_descriptors   forward and backward in one graph
    _functorch.partitioners.default_partition                   cut in two; saves all it needs
    _functorch._aot_autograd.descriptors                        what each input and output is
    testing._internal.distributed.fake_pg.FakeStore             a world with no second process
    distributed._functional_collectives.AsyncCollectiveTensor   what eager DTensor waits on
    utils._python_dispatch.TorchDispatchMode, utils._pytree.tree_leaves   seeing eager operators
    _inductor.fx_passes.overlap_scheduling   PyTorch's overlap scheduler, a rival (2.13 only)
    cuda.jiterator._create_jit_fn            an element-wise CUDA kernel from its source

The exit stack given to the joint export must be closed before anything real runs: until then its
fake mode is active. A DTensor input becomes two placeholders, its local tensor and its mesh.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import default_partition
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "AsyncCollectiveTensor",
    "GradientOf",
    "InputOf",
    "Joint",
    "TorchDispatchMode",
    "capture",
    "compile_elementwise",
    "fake_tensor_mode",
    "has_inductor_schedule",
    "inductor_schedule",
    "init_fake_world",
    "input_of",
    "process_group",
    "tree_leaves",
]


@dataclass(frozen=True)
class InputOf:
    """What a placeholder stands for."""

    role: str
    """`parameter`, `buffer`, `batch`, `tangent`, `mesh` or `saved`."""
    target: str
    """Qualified name of the parameter or buffer, index of the batch input, or empty."""


@dataclass(frozen=True)
class GradientOf:
    """What a backward output stands for."""

    parameter: str
    placements: tuple[Placement, ...] | None
    """Layout of the gradient if the parameter is a DTensor; may be partial."""


@dataclass(frozen=True)
class Joint:
    """A captured chunk, cut into forward and backward."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    gradients: tuple[GradientOf | None, ...]
    """Per backward output; None for outputs that are no gradient (meshes, absent gradients)."""


def capture(module: nn.Module, example_inputs: tuple[Tensor, ...]) -> Joint:
    """Trace `module(*example_inputs) -> scalar loss`. No collective runs, no memory is touched
    when the module holds fake tensors."""
    captured: Any = dynamo_graph_capture_for_export(module)(*example_inputs)
    stack = ExitStack()
    try:
        joint = aot_export_joint_with_descriptors(stack, captured, example_inputs)
        forward, backward = default_partition(joint.graph_module, [], num_fwd_outputs=1)
    finally:
        stack.close()
    return Joint(forward, backward, _gradients(joint, backward))


def _gradients(joint: Any, backward: fx.GraphModule) -> tuple[GradientOf | None, ...]:
    output = next(n for n in backward.graph.nodes if n.op == "output")
    subclass_meta = joint._aot_graph_capture.maybe_subclass_meta  # None without DTensors
    layouts = {}
    for meta in getattr(subclass_meta, "grad_input_metas", None) or ():
        start = getattr(meta, "flat_tensor_start_idx", None)
        if start is not None:
            layouts[start] = tuple(meta.original_subclass.placements)
    found: list[GradientOf | None] = []
    for index, desc in enumerate(output.meta["desc"]):
        local = isinstance(desc, SubclassGetAttrAOTOutput)
        base = desc.base if local else desc
        whole = not local or desc.attr == "_local_tensor"
        if isinstance(base, GradAOTOutput) and isinstance(base.grad_of, ParamAOTInput) and whole:
            found.append(GradientOf(base.grad_of.target, layouts.get(index) if local else None))
        else:
            found.append(None)
    return tuple(found)


def input_of(placeholder: fx.Node) -> InputOf:
    """What a placeholder of a captured graph stands for."""
    desc = placeholder.meta.get("desc")
    if isinstance(desc, SubclassGetAttrAOTInput):
        if desc.attr != "_local_tensor":
            return InputOf("mesh", "")
        desc = desc.base
    if isinstance(desc, ParamAOTInput):
        return InputOf("parameter", desc.target)
    if isinstance(desc, BufferAOTInput):
        return InputOf("buffer", desc.target)
    if isinstance(desc, PlainAOTInput):
        return InputOf("batch", str(desc.idx))
    if isinstance(desc, TangentAOTInput):
        return InputOf("tangent", "")
    return InputOf("saved", placeholder.name)


def init_fake_world(world_size: int) -> None:
    """A process group of `world_size` ranks with no other process; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def fake_tensor_mode() -> Any:
    """A mode under which tensors have shapes and no memory."""
    return torch._subclasses.fake_tensor.FakeTensorMode()


def process_group(name: str) -> dist.ProcessGroup:
    """The process group that a traced collective names."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def has_inductor_schedule() -> bool:
    """Whether torch has the overlap scheduler in the form that `inductor_schedule` calls."""
    return torch.__version__ >= "2.13"


def inductor_schedule(
    module: fx.GraphModule, milliseconds: Callable[[fx.Node], float | None]
) -> list[fx.Node]:
    """Nodes of a functional graph with traced collectives, in the order that PyTorch's greedy
    overlap scheduler gives them; changes `module`. A default process group must exist.

    Its own estimates, which the given times replace, ask Triton for a GPU's bandwidth, so they are
    not made.
    """
    from torch._inductor.fx_passes import overlap_scheduling as scheduling  # noqa: PLC0415 - slow

    def estimate(node: fx.Node, override_bytes: int | None) -> float | None:
        return 0.0 if override_bytes == 0 else milliseconds(node)

    with mock.patch.object(scheduling, "estimate_roofline_runtime_ms", return_value=0.0):
        found = scheduling.schedule_overlap_bucketing(
            module,
            collective_bucketing=False,
            insert_overlap_deps=False,
            custom_runtime_estimation=estimate,
            collective_estimator="analytical",
            compute_estimator="analytical",
        )
    return list(found.graph.nodes)


def compile_elementwise(source: str) -> Callable[..., Tensor]:
    """A function of CUDA tensors from a C++ function template of their elements. It is compiled
    when first called, by the compiler inside torch: no CUDA toolkit is needed."""
    return torch.cuda.jiterator._create_jit_fn(source)
