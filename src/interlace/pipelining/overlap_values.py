"""What PyTorch's runtime passes a stage, as the inputs of its graphs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interlace.errors import InputError
from interlace.graphs.strides import restrided, without_overlap
from interlace.pipelining.overlap_run import PassValues
from interlace.pipelining.stage_exchange import Described
from interlace.pipelining.traced_stage import GRADIENT, INPUT, Source, StageInputs


@dataclass(frozen=True)
class StageCall:
    """What a stage is called with for a micro-batch."""

    args: Sequence[Any]
    """Activations, or the arguments of the first stage."""
    kwargs: Mapping[str, Any]
    target: Sequence[Any]
    """Of the last stage, else empty."""
    loss_kwargs: Mapping[str, Any]


@dataclass
class _Layout:
    """Where each argument goes."""

    stage: int
    device: torch.device
    batch: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)

    def source(self, value: Any, name: str) -> Source:
        """A tensor is part of the batch, anything else is a constant of the graph."""
        Described.of(value)
        if not isinstance(value, Tensor):
            return "value", value
        if value.requires_grad:
            raise InputError(
                f"stage {self.stage}: {name} requires a gradient, and a traced stage gives one to "
                "parameters and activations only",
                hint="detach it, or register it as a parameter of the stage",
            )
        self.batch.append(without_overlap(value.detach()))
        return "batch", len(self.batch) - 1

    def activation(self, meta: Any) -> Source:
        """What another stage hands over, by its description."""
        like = self.blank(meta)
        if not meta.requires_grad:
            self.batch.append(like)
            return "batch", len(self.batch) - 1
        self.inputs.append(like)
        return "input", f"{INPUT}{len(self.inputs) - 1}"

    def blank(self, meta: Any) -> Tensor:
        """Zeros as described."""
        return torch.empty_strided(
            meta.shape, meta.stride, dtype=meta.dtype, device=self.device
        ).zero_()


def inputs_of(stage: Any, call: StageCall) -> StageInputs:
    """The inputs of the graphs of a stage, of which PyTorch knows the shapes; `call` is an example,
    in which the activations of later stages are left out. Raises InputError for an argument that
    requires a gradient."""
    layout = _Layout(stage.stage_index, torch.device(stage.device))
    meta = stage._stage_meta
    if stage.is_first:
        args = [layout.source(each, f"argument {n}") for n, each in enumerate(call.args)]
    else:
        args = [layout.activation(each) for each in meta.inputs]
    kwargs = {name: layout.source(each, repr(name)) for name, each in call.kwargs.items()}
    target = [layout.source(each, "target") for each in call.target]
    named = {name: layout.source(each, repr(name)) for name, each in call.loss_kwargs.items()}
    gradients = {} if stage.is_last else {
        number: layout.blank(each)
        for number, each in enumerate(meta.output_grads or ())
        if each is not None
    }  # fmt: skip
    if not stage.is_last and not gradients:
        raise InputError(
            f"stage {stage.stage_index} gives nothing that has a gradient",
            hint="check requires_grad of its parameters and torch.no_grad in its forward",
        )
    return StageInputs(
        args=tuple(args), kwargs=kwargs, target=tuple(target), loss_kwargs=named,
        batch=tuple(layout.batch), inputs=tuple(layout.inputs), gradients=gradients,
    )  # fmt: skip


def values_of(stage: int, inputs: StageInputs, call: StageCall) -> PassValues:
    """The same for a micro-batch. Raises InputError for arguments unlike those of the trace."""
    batch = list(inputs.batch)
    named: dict[tuple[str, str], Tensor] = {}
    for name, (kind, what), value in _pairs(stage, inputs, call):
        if kind == "value":
            if isinstance(value, Tensor) or Described.of(value) != Described.of(what):
                raise _unlike(stage, name, f"{value!r:.80}", f"{what!r:.80}")
            continue
        like = batch[what] if kind == "batch" else inputs.inputs[int(what.removeprefix(INPUT))]
        if not isinstance(value, Tensor) or _facts(value) != _facts(like):
            raise _unlike(stage, name, _shown(value), _shown(like))
        tensor = restrided(value.detach(), like.stride())
        if kind == "batch":
            batch[what] = tensor
        else:
            named["parameter", what] = tensor
    return PassValues(tuple(batch), named)


def gradients_of(inputs: StageInputs, received: Sequence[Tensor]) -> dict[tuple[str, str], Tensor]:
    """The gradients of a stage's outputs, as its backward reads them."""
    return {
        ("buffer", f"{GRADIENT}{number}"): restrided(received[number].detach(), like.stride())
        for number, like in inputs.gradients.items()
    }


def _pairs(stage: int, inputs: StageInputs, call: StageCall) -> Iterator[tuple[str, Source, Any]]:
    lists = (("argument", inputs.args, call.args), ("target", inputs.target, call.target))
    for what, sources, values in lists:
        if len(sources) != len(values):
            raise _unlike(stage, f"number of {what}s", str(len(values)), str(len(sources)))
        for number, (source, value) in enumerate(zip(sources, values, strict=True)):
            yield f"{what} {number}", source, value
    for known, given in ((inputs.kwargs, call.kwargs), (inputs.loss_kwargs, call.loss_kwargs)):
        if known.keys() != given.keys():
            raise _unlike(stage, "arguments by name", str(sorted(given)), str(sorted(known)))
        for name, source in known.items():
            yield repr(name), source, given[name]


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device.type


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _unlike(stage: int, name: str, found: str, before: str) -> InputError:
    return InputError(
        f"stage {stage}: {name} is {found}, and was {before} when the stage was traced",
        hint="keep shapes, types and plain values from micro-batch to micro-batch; make what "
        "changes a tensor, and rows of a batch divisible by n_microbatches",
    )
