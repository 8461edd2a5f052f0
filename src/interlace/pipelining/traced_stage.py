"""One stage of torch.distributed.pipelining, traced by itself into a forward and a backward.

A trace ends with a number and has gradients of parameters. So for the trace the activations that a
stage is given are parameters, the gradients of what it gives are buffers, and the number is one
whose gradient with respect to each output is that buffer. When the graphs run, these names stand
for the tensors of a micro-batch. On the last stage the number is the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from interlace.errors import InputError
from interlace.graphs.chunk_parts import cut_parts
from interlace.graphs.chunk_places import weight_half
from interlace.graphs.parts import HANDED, GraphPart
from interlace.graphs.trace import Binding
from interlace.ir.actions import Direction, Share, Strand
from interlace.ir.chunk_graphs import chunk_graphs
from interlace.ir.graph import OpGraph
from interlace.parallel.local_parts import local
from interlace.runtime.binding import ModuleBinding
from interlace.runtime.module_tree import refuse_gradient_hooks
from interlace.runtime.step_inputs import check_loss
from interlace.runtime.traced_strands import BACKWARD, FORWARD, Strands, build_strands

Source = tuple[str, Any]
"""Where an argument comes from: ("input", attribute of the module), ("batch", index), or
("value", what it is)."""
INPUT, GRADIENT = "input_", "gradient_"
"""Names, with a number, of the activations that a stage is given, and of its outputs' gradients."""
_HALVES = (Share.INPUT, Share.WEIGHT)


@dataclass(frozen=True)
class StageInputs:
    """What a stage is called with, and what its outputs' gradients look like."""

    args: tuple[Source, ...]
    kwargs: Mapping[str, Source]
    target: tuple[Source, ...]
    loss_kwargs: Mapping[str, Source]
    batch: tuple[Tensor, ...]
    """Examples of the arguments that are tensors without a gradient."""
    inputs: tuple[Tensor, ...]
    """Zeros like the activations that get a gradient."""
    gradients: Mapping[int, Tensor]
    """By number of the output, zeros like its gradient; empty for the last stage."""


class SeededStage(nn.Module):
    """A stage that gives a number, and its outputs beside it. See the head of this file."""

    def __init__(self, module: nn.Module, index: int, given: StageInputs, loss_fn: Any) -> None:
        """`loss_fn` is None but on the last stage."""
        super().__init__()
        self.name = f"stage_{index}"
        self.add_module(self.name, module)
        self.loss_fn = loss_fn
        for number, like in enumerate(given.inputs):
            self.register_parameter(f"{INPUT}{number}", nn.Parameter(like))
        for number, like in given.gradients.items():
            self.register_buffer(f"{GRADIENT}{number}", like)
        self._args, self._kwargs = given.args, dict(given.kwargs)
        self._target, self._loss_kwargs = given.target, dict(given.loss_kwargs)
        self._seeded = tuple(given.gradients)

    def forward(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """The number, and the tensors that the stage gives."""
        args = [self._argument(each, batch) for each in self._args]
        kwargs = {name: self._argument(each, batch) for name, each in self._kwargs.items()}
        output = getattr(self, self.name)(*args, **kwargs)
        flat = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        # What is handed on as it came would be no result of the graph.
        given = [*args, *kwargs.values()]
        results = tuple(_copied(each, given).detach() for each in flat)
        if self.loss_fn is not None:
            target = [self._argument(each, batch) for each in self._target]
            named = {n: self._argument(each, batch) for n, each in self._loss_kwargs.items()}
            return self.loss_fn(output, *target, **named), *results
        seeds = [_Seed.apply(flat[n], getattr(self, f"{GRADIENT}{n}")) for n in self._seeded]
        return torch.stack(seeds).sum() if len(seeds) > 1 else seeds[0], *results

    def _argument(self, source: Source, batch: Sequence[Tensor]) -> Any:
        kind, what = source
        if kind == "input":
            return getattr(self, what)
        return batch[what] if kind == "batch" else what


class _Seed(torch.autograd.Function):
    """A zero whose gradient with respect to a tensor is another one."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


def _copied(tensor: Tensor, given: Sequence[Any]) -> Tensor:
    return tensor.clone() if any(tensor is each for each in given) else tensor


@dataclass(frozen=True, kw_only=True)
class TracedStage:
    """A stage as graphs."""

    index: int
    module: SeededStage
    strands: Strands
    """Forward and backward, whole."""
    binding: ModuleBinding
    example: tuple[Tensor, ...]
    parts: Mapping[str, GraphPart]
    """By label, such as `backward_3`: the same, and the halves of backwards if they are wanted."""
    op_graphs: Mapping[str, OpGraph]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the activations that get a gradient, which may be none if the stage ignores
        one."""
        named = self.module.named_parameters(recurse=False)
        return tuple(name for name, _ in named)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The user's parameters that get a gradient, by their names in the graphs."""
        own = dict(self.module.named_parameters(remove_duplicate=False))
        return {name: own[name] for name in self.strands.parameters if name not in self.inputs}

    def constants(self) -> dict[tuple[str, str], Tensor]:
        """Parameters and buffers as they are now, by (role, target)."""
        named = self.module.named_parameters(remove_duplicate=False)
        found = {("parameter", name): local(each) for name, each in named}
        return {**found, **self.strands.buffers()}

    def free_examples(self) -> None:
        """Give back the memory of the activations and gradients that the trace and the measuring
        were made with."""
        for each in (*self.module.parameters(recurse=False), *self.module.buffers(recurse=False)):
            each.untyped_storage().resize_(0)
        self.binding.accept()


def trace_stage(
    module: nn.Module,
    index: int,
    given: StageInputs,
    loss_fn: Any,
    axis_of_group: Mapping[str, str],
    *,
    halves: bool,
) -> TracedStage:
    """Trace a stage, the last one with `loss_fn`, others with None; `halves` adds the gradients of
    inputs and those of weights apart.

    Raises InputError naming what cannot be traced."""
    seeded = SeededStage(module, index, given, loss_fn)
    refuse_gradient_hooks(seeded)
    dtype = _type_of_sums(module)
    strands = build_strands(
        seeded, given.batch, axis_of_group, buffer_dtype=dtype, fused_sums=False, watch=True
    )
    check_loss(strands)
    assert strands.reads is not None
    device = next(seeded.parameters()).device
    parts, graphs = _labelled(strands, index, halves=halves)
    return TracedStage(
        index=index, module=seeded, strands=strands, example=given.batch,
        binding=ModuleBinding(seeded, strands.reads, device), parts=parts, op_graphs=graphs,
    )  # fmt: skip


def _type_of_sums(module: nn.Module) -> torch.dtype:
    """That of the parameters, as autograd adds gradients up in their own type."""
    dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        raise InputError(
            f"it has trainable parameters of {len(dtypes)} types: "
            f"{', '.join(sorted(map(str, dtypes)))}",
            hint="give all of them one type, or freeze those of the others",
        )
    return dtypes.pop() if dtypes else torch.float32


def _labelled(
    strands: Strands, index: int, *, halves: bool
) -> tuple[dict[str, GraphPart], dict[str, OpGraph]]:
    """What the strands of the stage run, by label; values that they hand over have the number of
    the stage in their names."""
    forward, backward = (Strand(way, index).label for way in Direction)
    parts = {forward: strands.parts[FORWARD], backward: strands.parts[BACKWARD]}
    graphs = {forward: strands.op_graphs[FORWARD], backward: strands.op_graphs[BACKWARD]}
    if halves:
        labels = [Strand(Direction.BACKWARD, index, share).label for share in _HALVES]
        late = _late(strands.parts[BACKWARD])
        label_of = {name: labels[name in late] for name in strands.parts[BACKWARD].operators}
        cut = cut_parts(
            strands.parts[BACKWARD], labels, label_of, _no_home, apart=lambda *_: False
        )  # fmt: skip
        parts |= cut.parts
        graphs |= chunk_graphs(strands.op_graphs[BACKWARD], labels, label_of)
    return {label: _numbered(part, index) for label, part in parts.items()}, graphs


def _late(backward: GraphPart) -> frozenset[str]:
    """The operators of a backward that no gradient of an activation follows from; of a stage that
    is given none, those that no more than one weight's gradient follows from."""
    sums = {
        node
        for node, binding in backward.inputs.items()
        if binding.role == "gradient" and binding.target.startswith(INPUT)
    }
    needed = {node for node in backward.operators.values() if sums & set(node.all_input_nodes)}
    if not needed:
        return weight_half(backward, dict.fromkeys(backward.operators, 0))
    stack = list(needed)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in needed:
                needed.add(source)
                stack.append(source)
    return frozenset(name for name, node in backward.operators.items() if node not in needed)


def _numbered(part: GraphPart, index: int) -> GraphPart:
    def named(binding: Binding) -> Binding:
        if binding.role not in HANDED:
            return binding
        return Binding(binding.role, f"stage_{index}.{binding.target}")

    return replace(
        part,
        inputs={node: named(binding) for node, binding in part.inputs.items()},
        names=tuple(named(binding) for binding in part.names),
    )


def _no_home(name: Binding, maker: str | None) -> list[str]:
    raise AssertionError(f"the backward gives {name.target!r}, made by {maker}")
