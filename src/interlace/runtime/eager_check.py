"""A compiled step against plain autograd on the same module and micro-batches."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from interlace.parallel.data import DataLayout
from interlace.parallel.local_parts import local
from interlace.runtime.executor import Batch
from interlace.text import aligned, milliseconds

_functional = torch.ops._c10d_functional
_SHOWN = 10
"""Gradients that a summary lists; a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDifference:
    """One gradient, by both ways; of a DTensor this rank's part."""

    name: str
    largest: float
    """Of the eager gradient's magnitudes."""
    difference: float
    """The largest one; nan if either has a nan."""

    @property
    def relative(self) -> float:
        """The difference over the largest magnitude; 0 for two equal gradients."""
        return self.difference / self.largest if self.largest else self.difference


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """What a compiled step and eager PyTorch made of the same micro-batches, on this rank."""

    losses: tuple[tuple[float, float], ...]
    """(eager, compiled) of each micro-batch."""
    gradients: tuple[GradientDifference, ...]
    """The largest relative difference first."""
    missing: tuple[str, ...]
    """Parameters that got a gradient by one of both ways only."""
    eager_ns: tuple[int, ...]
    step_ns: tuple[int, ...]
    """Times of steps that took turns."""

    @property
    def same_bits(self) -> bool:
        """Whether losses and gradients are equal to the last bit."""
        alike = all(eager == compiled for eager, compiled in self.losses)
        return alike and not self.missing and all(each.difference == 0 for each in self.gradients)

    @property
    def worst(self) -> float:
        """The largest relative difference of a gradient; infinite if one is missing."""
        if self.missing:
            return float("inf")
        return self.gradients[0].relative if self.gradients else 0.0

    def summary(self) -> str:
        """Losses, the gradients that differ most, and times, for people."""
        off = max(abs(eager - compiled) for eager, compiled in self.losses)
        same = sum(each.difference == 0 for each in self.gradients)
        lines = [
            f"losses of {len(self.losses)} micro-batches: "
            + ("equal to the last bit" if off == 0 else f"off by {off:.2g} at most"),
            f"gradients: {same} of {len(self.gradients)} equal to the last bit",
        ]
        if self.missing:
            lines.append(f"by one way only: {', '.join(self.missing)}")
        rows = [
            (each.name, f"{each.largest:.3g}", f"{each.difference:.2g}", f"{each.relative:.2g}")
            for each in self.gradients[:_SHOWN]
            if each.difference != 0
        ]
        if rows:
            header = ("gradient", "largest value", "off by", "relative")
            lines += ["", aligned(header, rows, text_columns=1), ""]
        if self.step_ns:
            eager, compiled = median(self.eager_ns), median(self.step_ns)
            lines.append(
                f"eager {milliseconds(eager)} ms, compiled {milliseconds(compiled)} ms: "
                f"{eager / compiled:.2f} times as fast, the median of {len(self.step_ns)} steps in "
                "turn"
            )
        return "\n".join(lines)


def compare_with_eager(
    chunk: nn.Module,
    step: Callable[[], Sequence[Tensor]],
    batches: Sequence[Batch],
    *,
    data: DataLayout | None,
    repeats: int,
) -> StepComparison:
    """Runs `chunk`, a module with its loss, under autograd, and `step`, which puts gradients into
    `parameter.grad` and gives the losses; once to compare, and `repeats` times in turn for times.
    `data` are the replicas over which gradients are averaged. Gradients and buffers of the module
    are afterwards as they were."""
    times: tuple[list[int], list[int]] = ([], [])
    with _set_aside(chunk):
        eager_losses = _eager(chunk, batches, data)
        eager = _gradients(chunk)
        losses = [float(each) for each in step()]
        ours = _gradients(chunk)
        for _ in range(repeats):
            times[0].append(timed(lambda: _eager(chunk, batches, data), batches))
            _gradients(chunk)
            times[1].append(timed(step, batches))
            _gradients(chunk)
    pairs = zip((float(each) for each in eager_losses), losses, strict=True)
    return comparison_of(list(pairs), eager, ours, times)


def comparison_of(
    losses: Sequence[tuple[float, float]],
    eager: Mapping[str, Tensor],
    ours: Mapping[str, Tensor],
    times: tuple[Sequence[int], Sequence[int]],
) -> StepComparison:
    """What two ways made of the same micro-batches: (eager, compiled) losses, gradients by name,
    and the ns of steps."""
    found = [_difference(name, eager[name], ours[name]) for name in eager.keys() & ours.keys()]
    return StepComparison(
        losses=tuple(losses),
        gradients=tuple(sorted(found, key=lambda each: (-_order(each.relative), each.name))),
        missing=tuple(sorted(eager.keys() ^ ours.keys())),
        eager_ns=tuple(times[0]),
        step_ns=tuple(times[1]),
    )


@contextmanager
def _set_aside(module: nn.Module) -> Iterator[None]:
    """Inside, parameters have no gradients; afterwards the ones that they had, which may lie in
    buffers that a step writes to, and buffers have the values that they had."""
    given = {p: p.grad for p in module.parameters() if p.grad is not None}
    values = [(local(each), local(each).clone()) for each in (*given.values(), *module.buffers())]
    for parameter in given:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter in module.parameters():
            parameter.grad = given.get(parameter)
        for tensor, value in values:
            tensor.copy_(value)


def _eager(chunk: nn.Module, batches: Sequence[Batch], data: DataLayout | None) -> list[Tensor]:
    """The losses; gradients of their mean over micro-batches and replicas are left in `grad`."""
    ranks = 1 if data is None else data.ranks
    losses = []
    with torch.enable_grad():
        for batch in batches:
            given = chunk(*batch)
            loss = given[0] if isinstance(given, tuple) else given
            loss.backward(torch.full_like(loss, 1 / (len(batches) * ranks)))
            losses.append(loss.detach())
    if data is not None:
        _add_up(dict(chunk.named_parameters(remove_duplicate=False)), data)
    return losses


def _add_up(parameters: Mapping[str, nn.Parameter], data: DataLayout) -> None:
    """Sum gradients over the ranks that hold the same weights."""
    for bucket in data.buckets:
        for weight in bucket.weights:
            if (gradient := parameters[weight.name].grad) is None:
                continue
            own = local(gradient)
            for axis in bucket.axes:
                total = _functional.all_reduce(own, "sum", axis.group)
                own.copy_(_functional.wait_tensor(total))


def _gradients(chunk: nn.Module) -> dict[str, Tensor]:
    """Copies by the user's names, laid out as their parameters, which have none afterwards."""
    found = {}
    for name, parameter in chunk.named_parameters():
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            continue
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        found[name.removeprefix("module.")] = local(gradient).clone()
    return found


def _difference(name: str, eager: Tensor, ours: Tensor) -> GradientDifference:
    if eager.equal(ours) or not eager.numel():
        largest = float(eager.abs().max()) if eager.numel() else 0.0
        return GradientDifference(name=name, largest=largest, difference=0.0)
    eager, ours = eager.double(), ours.double()
    return GradientDifference(
        name=name, largest=float(eager.abs().max()), difference=float((eager - ours).abs().max())
    )


def _order(relative: float) -> float:
    """A nan is the worst."""
    return float("inf") if math.isnan(relative) else relative


def timed(run: Callable[[], object], batches: Sequence[Batch]) -> int:
    """ns of a run, with what the device has to do for it."""
    device = batches[0][0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter_ns()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - began
