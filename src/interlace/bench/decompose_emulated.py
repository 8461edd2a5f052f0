"""Matmuls, those of experts too, convolutions and attention that take a given time: asleep instead
of computing, for more ranks than there are cores, or paced, for cores that others slow down."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from interlace.experts.grouped import ADD_WEIGHT_GRADIENT, MATMUL, WEIGHT_GRADIENT
from interlace.graphs.torch_private import TorchDispatchMode

aten = torch.ops.aten

_MATMULS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addmm_, aten.baddbmm_}
"""Operators whose time is pretended, as that of attention."""
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 2,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 5,
}
"""Matmuls of S x T x E per head in one call."""


def _convolved(args: Sequence[Any]) -> Tensor:
    """The zeros that `convolution(input, weight, bias, stride, padding, dilation, ...)` gives."""
    x, weight, _, stride, padding, dilation = args[:6]
    places = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    image = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in places]
    return x.new_zeros((x.shape[0], weight.shape[0], *image))


def _convolution_gradients(args: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Zeros for those of input, weight and bias that `convolution_backward` is asked for."""
    _, x, weight, bias_sizes = args[:4]
    shapes = (x.shape, weight.shape, bias_sizes)
    return tuple(
        x.new_zeros(shape) if wanted else None
        for shape, wanted in zip(shapes, args[-1], strict=True)
    )


_CONVOLUTIONS: Mapping[Any, Callable[[Sequence[Any]], Any]] = {
    aten.convolution: _convolved,
    aten.convolution_backward: _convolution_gradients,
}
"""What a convolution gives that is pretended; none of ours is transposed."""


_EXPERTS: Mapping[Any, Callable[[Sequence[Any]], Tensor]] = {
    MATMUL: lambda a: a[0].new_zeros(a[0].shape[0], a[1].shape[2 if a[4] else 1]),
    WEIGHT_GRADIENT: lambda a: a[0].new_zeros(a[2].shape[1] // a[3], a[0].shape[1], a[1].shape[1]),
    ADD_WEIGHT_GRADIENT: lambda a: a[0],
}
"""What matmuls of experts give that are pretended."""


@contextmanager
def emulated_compute(flops_per_s: float, *, paced: bool = False) -> Iterator[Callable[[], None]]:
    """Inside, every matmul, convolution and attention takes its FLOPs / `flops_per_s` asleep;
    results are zeros. With `paced` it is computed and then sleeps for the rest of that time. One
    that took longer shortens the sleep of the next ones, until what is yielded is called.

    Everything else, transfers above all, is done as ever. Holds in the thread that enters it, and
    for the backward passes that it starts. A slice takes exactly its share of the whole, so
    slicing loses nothing.
    """
    with _Sleeping(flops_per_s, paced=paced) as sleeping:
        yield sleeping.forget


class _Sleeping(TorchDispatchMode):
    def __init__(self, flops_per_s: float, *, paced: bool) -> None:
        super().__init__()
        self.flops_per_s = flops_per_s
        self.paced = paced
        self._late_s = 0.0
        """By how much the sleeps so far were too long; the next ones are shorter."""

    def forget(self) -> None:
        """From now on the next ones last no shorter for those before."""
        self._late_s = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # its parts come by themselves
        kwargs = kwargs or {}
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return func(*args, **kwargs)  # it is traced

        def computed() -> Any:
            return func(*args, **kwargs)

        if func.overloadpacket in _MATMULS:
            zeros = partial(_matmul_zeros, func, args, kwargs)
            return self._slept(_matmul_flops(args), computed if self.paced else zeros)
        if func.overloadpacket in _ATTENTION:
            values = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            values |= kwargs
            count = _ATTENTION[func.overloadpacket]
            zeros = partial(_attention_zeros, values)
            flops = count * _attention_flops(values)
            return self._slept(flops, computed if self.paced else zeros)
        if func in _EXPERTS:
            zeros = partial(_EXPERTS[func], args)
            return self._slept(_expert_flops(func, args), computed if self.paced else zeros)
        if func.overloadpacket in _CONVOLUTIONS:
            zeros = partial(_CONVOLUTIONS[func.overloadpacket], args)
            return self._slept(_convolution_flops(args), computed if self.paced else zeros)
        return computed()

    def _slept(self, flops: int, make: Callable[[], Any]) -> Any:
        end = time.perf_counter() + flops / self.flops_per_s - self._late_s
        result = make()
        time.sleep(max(0.0, end - time.perf_counter()))
        self._late_s = time.perf_counter() - end
        return result


def _matmul_flops(args: Sequence[Any]) -> int:
    left, right = [value for value in args if isinstance(value, Tensor)][-2:]
    return 2 * math.prod(left.shape) * right.shape[-1]


def _matmul_zeros(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    if "out" in kwargs:
        return kwargs["out"].zero_()
    if func.overloadpacket in (aten.addmm_, aten.baddbmm_):
        return args[0]
    left, right = [value for value in args if isinstance(value, Tensor)][-2:]
    return left.new_zeros((*left.shape[:-1], right.shape[-1]))


def _expert_flops(func: Any, args: Sequence[Any]) -> int:
    """2 x rows x columns x columns: rows of the first operand that is no buffer, which has as many
    as were routed."""
    if func == MATMUL:
        rows, weight = args[:2]
        return 2 * rows.shape[0] * weight.shape[1] * weight.shape[2]
    gradient, rows = args[1:3] if func == ADD_WEIGHT_GRADIENT else args[:2]
    return 2 * rows.shape[0] * rows.shape[1] * gradient.shape[1]


def _attention_flops(values: Mapping[str, Any]) -> int:
    """Of one matmul; half of it when causal."""
    *heads, length, size = values["query"].shape
    pairs = length * values["key"].shape[-2]
    return 2 * math.prod(heads) * pairs * size // (2 if values.get("is_causal") else 1)


def _attention_zeros(values: Mapping[str, Any]) -> tuple[Tensor, ...]:
    query, key, value = (values[name] for name in ("query", "key", "value"))
    if "grad_out" in values:
        return query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
    # The kernel's log-sum-exp is [N, H, S].
    return query.new_zeros(query.shape), query.new_zeros(query.shape[:-1])


def _convolution_flops(args: Sequence[Any]) -> int:
    """A product for each place of the output and each weight, times images; in backward so many for
    the input and for the weight."""
    asked = args[-1] if isinstance(args[-1], (list, tuple)) else None
    output, weight = (_convolved(args), args[1]) if asked is None else (args[0], args[2])
    images, _, *image = output.shape
    return 2 * images * math.prod(image) * weight.numel() * (1 if asked is None else sum(asked[:2]))
