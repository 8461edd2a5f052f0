"""Runs a module of somebody else by `compile_step` and beside it a twin by eager autograd.

The twin is whole and sits in one process; the module is laid out over the ranks, or copied to
each of them. Both take two optimizer steps, with a change between them if the case has one. What
may come out: equal losses and equal whole gradients in both steps, or a refusal by name.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import interlace
from interlace.config import PlanConfig
from interlace.errors import InterlaceError
from interlace.schedules.finder import find

Batch = tuple[Tensor, ...]


QUICK = PlanConfig(cluster="h100", search="list")
"""Measuring takes longer than all else, and after that the search for the best order; any will do
for numbers."""
MICRO_BATCHES = 4
LEARNING_RATE = 0.05
RIGHT = "right"


def call(module: nn.Module, *batch: Tensor) -> Tensor:
    """The loss of a module that returns one number."""
    return module(*batch)


def squares(module: nn.Module, *batch: Tensor) -> Tensor:
    """The mean square of what a module returns: every output has a gradient of its own."""
    return module(*batch).square().mean()


@dataclass(frozen=True)
class Case:
    """A module from outside, how it is trained, and what must come of it."""

    name: str
    make: Callable[[], nn.Module]
    """The whole module, with seeded weights."""
    batch: Callable[[], Any]
    """One micro-batch, drawn anew at each call."""
    loss: Callable[..., Tensor] = squares
    lay_out: Callable[[nn.Module, DeviceMesh], object] | None = None
    """Lays the module out over a mesh of one dimension; None: a copy on each rank, and the ranks
    share the micro-batches among them."""
    change: Callable[[nn.Module], object] | None = None
    """What happens to module and twin between the two steps."""
    refused: str = ""
    """Pattern of the refusal; empty if the numbers must be right."""
    bound: float = 1e-10
    """Largest difference of a gradient over the largest gradient; the default is for float64."""
    axis: str = "tp"
    """Name of the mesh's dimension over which `lay_out` lays the module out."""
    tell: Callable[[nn.Module, interlace.Step, int], object] | None = None
    """Gives the twin what the next step will draw at random; the number is that of the ranks that
    share the micro-batches."""


class Wrong(Exception):
    """Other numbers than the twin's."""


def outcomes(case: Case, mesh: DeviceMesh | None) -> list[str]:
    """What comes of two strands and of one, and whether their bits are equal. One strand runs the
    graphs that were traced for two, unless the module is changed between the steps: a trace, which
    is most of the time, knows nothing of strands. So what it refuses is refused for both."""
    found, bits = [], []
    first: Trained | None = None
    for strands in (2, 1):
        try:
            first = _trained(case, mesh, strands, first)
            bits.append(first.bits)
            found.append(RIGHT)
        except InterlaceError as error:
            found.append(f"refused: {type(error).__name__}: {error}")
        except Wrong as error:
            found.append(f"wrong with {strands} strand(s): {error}")
        except Exception as error:  # told as an outcome: the other cases go on
            found.append(f"crashed with {strands} strand(s): {type(error).__name__}: {error}")
        if first is None and case.change is None:
            break
    if len(bits) == 2 and not all(torch.equal(*pair) for pair in zip(*bits, strict=True)):
        found.append("two strands have other bits than one")
    return found


@dataclass(frozen=True)
class Trained:
    """A step that was right, and what it takes to begin again."""

    step: interlace.Step
    module: nn.Module
    batches: list[Batch]
    start: list[Tensor]
    """Parameters and buffers before the first step."""
    bits: list[Tensor]
    """Losses and gradients of both steps."""


def _trained(case: Case, mesh: DeviceMesh | None, strands: int, first: Trained | None) -> Trained:
    """Raises Wrong if losses or gradients are not the twin's."""
    module, twin = (seeded(case.make) for _ in range(2))  # a copy would lose gradient hooks
    batches = [case.batch() for _ in range(MICRO_BATCHES)]
    if mesh is not None and case.lay_out is not None:
        case.lay_out(module, mesh)
    shared = mesh is not None and case.lay_out is None
    own = slice(mesh.get_local_rank(), None, mesh.size()) if mesh and shared else slice(None)
    if first is not None and case.change is None:
        module, batches = first.module, first.batches
        step = one_strand_of(first.step, module, first.start)
    else:
        step = interlace.compile_step(
            module, case.loss, batches[own][0], mesh=mesh, strands=strands, config=QUICK
        )
    start = state_of(module)
    found: list[Tensor] = []
    for number in (1, 2):
        wanted = eager(case, twin, batches)
        step(batches[own])
        found += [*step.losses, *gradients_of(module).values()]
        compare_losses(case, number, step.losses, wanted[own])
        compare_gradients(case, number, module, twin)
        for each in (module, twin):
            torch.optim.SGD(each.parameters(), lr=LEARNING_RATE).step()
            each.zero_grad()
            if case.change is not None and number == 1:
                case.change(each)
    return Trained(step, module, batches, start, [each.detach().clone() for each in found])


def one_strand_of(step: interlace.Step, module: nn.Module, start: list[Tensor]) -> interlace.Step:
    """The graphs of `step` in traced order, as of `compile_step(strands=1)`, on the module as it
    was when `state_of` gave `start`. Nothing is traced again."""
    with torch.no_grad():
        for tensor, value in zip(_state(module), start, strict=True):
            tensor.copy_(value)
    strands = step.strands
    return interlace.Step(
        strands, strands.sequential, step.tensors, schedule=find("one_strand"), draws=step.draws
    )


def state_of(module: nn.Module) -> list[Tensor]:
    """Copies of parameters and buffers."""
    return [each.detach().clone() for each in _state(module)]


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make()


def eager(case: Case, twin: nn.Module, batches: list[Any]) -> list[Tensor]:
    losses = []
    for batch in batches:
        loss = (
            case.loss(twin, *batch) if isinstance(batch, (tuple, list)) else case.loss(twin, batch)
        )
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return losses


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Whole gradients of all parameters that have one, by name."""
    found = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            assert isinstance(parameter, DTensor)
            if gradient.placements != parameter.placements:
                raise Wrong(f"{name}: gradient {gradient.placements} of {parameter.placements}")
            gradient = gradient.full_tensor()
        if gradient is not None:
            found[name] = gradient.detach().clone()
    return found


def compare_losses(case: Case, number: int, found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        if not torch.allclose(one, other, rtol=case.bound, atol=case.bound):
            raise Wrong(f"step {number}: loss {float(one)}, eager {float(other)}")


def compare_gradients(case: Case, number: int, module: nn.Module, twin: nn.Module) -> None:
    found, wanted = gradients_of(module), gradients_of(twin)
    if found.keys() != wanted.keys():
        raise Wrong(f"step {number}: gradients of {sorted(found)}, eager {sorted(wanted)}")
    largest = max(float(each.abs().max()) for each in wanted.values() if each.numel())
    for name, gradient in found.items():
        other = wanted[name]
        if (gradient.shape, gradient.dtype) != (other.shape, other.dtype):
            raise Wrong(f"step {number}: {name} has a gradient of {gradient.dtype}{gradient.shape}")
        if gradient.numel() == 0:
            continue
        error = float((gradient - other).abs().max())
        if not error <= case.bound * largest:
            raise Wrong(f"step {number}: gradient of {name} is off by {error} of {largest}")


def mesh_of(case: Case) -> DeviceMesh | None:
    """All ranks as one axis: of tensor-parallel ranks, or of copies."""
    world = int(os.environ["WORLD_SIZE"])
    if world == 1 and case.lay_out is None:
        return None
    name = "dp_replicate" if case.lay_out is None else case.axis
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return init_device_mesh("cpu", (world,), mesh_dim_names=(name,))
