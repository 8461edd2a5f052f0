"""Matmuls and attention that sleep instead of computing, for more ranks than there are cores."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from interlace.graphs.torch_private import TorchDispatchMode

aten = torch.ops.aten

_MATMULS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addmm_, aten.baddbmm_}
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 2,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 5,
}
"""Matmuls of S x T x E per head in one call."""


@contextmanager
def emulated_compute(flops_per_s: float) -> Iterator[None]:
    """Inside, every matmul and attention takes its FLOPs / `flops_per_s` asleep; results are zeros.

    Everything else, transfers above all, is done as ever. Holds in the thread that enters it, and
    for the backward passes that it starts. A slice takes exactly its share of the whole, so
    slicing loses nothing.
    """
    with _Sleeping(flops_per_s):
        yield


class _Sleeping(TorchDispatchMode):
    def __init__(self, flops_per_s: float) -> None:
        super().__init__()
        self.flops_per_s = flops_per_s
        self._late_s = 0.0
        """By how much the sleeps so far were too long; the next ones are shorter."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _MATMULS:
            return self._slept(_matmul_flops(args), lambda: _matmul_zeros(func, args, kwargs))
        if func.overloadpacket in _ATTENTION:
            values = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            values |= kwargs
            count = _ATTENTION[func.overloadpacket]
            return self._slept(count * _attention_flops(values), lambda: _attention_zeros(values))
        return func(*args, **kwargs)

    def _slept(self, flops: int, zeros: Callable[[], Any]) -> Any:
        end = time.perf_counter() + flops / self.flops_per_s - self._late_s
        result = zeros()
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
