"""Stages on their way between ranks: their code and buffers, without the values of parameters.

A step is cut from the graph of the whole model, so every rank has to trace the stages of all
others. What tracing reads of a module is its classes, its plain values and the shapes of its
parameters, and its buffers where operators are timed; that is what travels here, once.
"""

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from interlace.errors import InputError

_WHOLE_MODEL = "give the whole model to interlace.compile_step with a mesh axis pp"
"""What to do with stages that cannot travel."""


@dataclass(frozen=True)
class Described:
    """An argument: a tensor by its shape and type, or any other value itself."""

    value: Any = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, value: Any) -> "Described":
        """Raises InputError for containers with tensors in them and for tensors that are no plain
        ones."""
        if isinstance(value, Tensor):
            if isinstance(value, DTensor) or value.layout != torch.strided:
                raise InputError(
                    f"an argument is a {type(value).__name__} of layout {value.layout}, not a "
                    "plain tensor",
                    hint="pass plain tensors",
                )
            return cls(shape=tuple(value.shape), dtype=value.dtype)
        if value is not None and not isinstance(value, bool | int | float | str):
            raise InputError(
                f"an argument is a {type(value).__name__}, not a tensor or a plain value",
                hint="pass its tensors as arguments of their own",
            )
        return cls(value=value)


@dataclass(frozen=True, kw_only=True)
class RankSide:
    """What one rank brings to a pipeline: its stages, and what its calls pass."""

    stages: tuple[int, ...]
    """Their numbers in the pipeline."""
    modules: bytes
    args: tuple[Described, ...] = ()
    """What it passes to the first stage, if that is here."""
    kwargs: Mapping[str, Described]
    """What it passes to all its stages."""
    target: tuple[Described, ...] = ()
    """What it passes to the loss behind the output, if the last stage is here: one or none."""
    loss_kwargs: Mapping[str, Described]


def packed(modules: list[nn.Module]) -> bytes:
    """Modules as bytes. Raises InputError for what cannot be pickled, and for DTensors."""
    out = io.BytesIO()
    try:
        _Packer(out, protocol=pickle.HIGHEST_PROTOCOL).dump(modules)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"a stage cannot be pickled, and the other ranks have to trace it too: {error}",
            hint=f"keep lambdas and local classes out of its attributes, or {_WHOLE_MODEL}",
        ) from error
    return out.getvalue()


def unpacked(data: bytes, device: torch.device) -> list[nn.Module]:
    """The modules of another rank of this job, on `device`. All parameters are zero."""
    return list(_Unpacker(io.BytesIO(data), device).load())


class _Packer(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        """A tensor by its shape; of a buffer its values, too."""
        if not isinstance(obj, Tensor):
            return None
        if isinstance(obj, DTensor):
            raise InputError(
                f"a stage has a DTensor of shape {list(obj.shape)}, which only its own ranks hold",
                hint=_WHOLE_MODEL,
            )
        values = None
        if not isinstance(obj, nn.Parameter):
            values = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        facts = tuple(obj.shape), obj.stride(), obj.dtype, obj.device.type, obj.requires_grad
        return id(obj), facts, values


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, device: torch.device) -> None:
        super().__init__(data)
        self._device = device
        self._known: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        """The tensor, one for each of the other rank's."""
        key, (shape, stride, dtype, kind, requires_grad), values = pid
        if key in self._known:
            return self._known[key]
        device = self._device if kind == self._device.type else torch.device(kind)
        if values is None:
            zeros = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
            self._known[key] = nn.Parameter(zeros, requires_grad=requires_grad)
        else:
            has_some = len(values) > 0  # frombuffer refuses none
            flat = torch.frombuffer(bytearray(values), dtype=dtype) if has_some else []
            self._known[key] = torch.as_tensor(flat, dtype=dtype).view(shape).to(device)
        return self._known[key]
