"""A step for each shape of batches, compiled when that shape first comes."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from interlace.api import compile_step
from interlace.config import OverlapConfig
from interlace.errors import InputError
from interlace.runtime.batch_form import BatchForm
from interlace.runtime.fsdp_step import mesh_of_fully_shard
from interlace.runtime.same_shapes import agree_on_shape
from interlace.runtime.step_ranks import StepRanks
from interlace.runtime.user_module import LossFunction
from interlace.step import Step

MOST_SHAPES = 4
"""Steps that are compiled at most where nothing is said: a few buckets of lengths."""
_ALIKE = (
    "sort samples into a few lengths and pad to these, with the same length on all ranks at a step"
)
"""Hint where shapes do not go together."""


class ShapedSteps:
    """Steps of one module by the shapes of their micro-batches: a graph has fixed shapes."""

    steps: dict[str, Step]
    """By the shapes of a micro-batch, in words: those that were compiled."""
    last: Step | None
    """The one that ran last, with its losses and results; it records and compares."""

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFunction,
        *,
        most: int = MOST_SHAPES,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        """At most `most` shapes are compiled; a further one is refused. All else is as for
        `compile_step`, which each first use of a shape calls, at its cost; `stages` are refused.

        Collective on the ranks of `mesh`, or else of the default process group, as every use is:
        shapes are compared at each step, over some hundred bytes. All steps keep gradients in the
        same sums, but under `fully_shard`, where each has shards of its own.
        """
        if options.get("stages"):
            raise InputError(
                "ShapedSteps and stages are both given, and stages with meshes of their own see "
                "other rows of a batch",
                hint="compile one step, for batches of one shape",
            )
        if most < 1:
            raise InputError(f"most = {most} must be positive", hint="set most to 1 or more")
        self.steps = {}
        self.last = None
        self._module, self._loss_fn, self._most = module, loss_fn, most
        self._mesh = mesh if mesh is not None else mesh_of_fully_shard(module)
        self._options = options
        overlap = options.get("overlap") or OverlapConfig()
        self._group = StepRanks.of(self._mesh, (), overlap).members

    def __repr__(self) -> str:
        """The shapes that were compiled, each with its step."""
        compiled = "".join(f"\n  {shape}: {step!r}" for shape, step in self.steps.items())
        return f"ShapedSteps({len(self.steps)} of at most {self._most} shapes compiled){compiled}"

    def __call__(self, micro_batches: Sequence[Any]) -> Tensor:
        """The mean loss; gradients are in `param.grad`, as after `Step.__call__`. The micro-batches
        of a call have one shape, the same on all ranks. Raises InputError or PeerError, on all
        ranks, for others, and InputError for one shape too many; the module is as it was then.
        """
        return self._step(micro_batches)(micro_batches)

    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """The mean loss of a forward alone, as `Step.evaluate`."""
        return self._step(micro_batches).evaluate(micro_batches)

    def _step(self, micro_batches: Sequence[Any]) -> Step:
        """The step for these micro-batches, which runs as the next one of training. Collective."""
        agree_on_shape(
            lambda: f"{len(micro_batches)} micro-batches of {_shape_of(micro_batches)}",
            self._group,
            hint=_ALIKE,
        )
        shape = _shape_of(micro_batches)
        step = self.steps.get(shape)
        if step is None:
            step = self._compiled(shape, micro_batches[0])
        if self.last is not None:
            step.number = self.last.number
        self.last = step
        return step

    def _compiled(self, shape: str, example: Any) -> Step:
        if len(self.steps) == self._most:
            raise InputError(
                f"micro-batches of {shape} are one shape more than the {self._most} that may be "
                f"compiled: {'; '.join(self.steps)}",
                hint=f"pad to one of these, or give ShapedSteps(most={self._most + 1})",
            )
        step = compile_step(self._module, self._loss_fn, example, mesh=self._mesh, **self._options)
        first = next(iter(self.steps.values()), None)
        if first is not None:
            step.share_sums(first)
        self.steps[shape] = step
        return step


def _shape_of(micro_batches: Sequence[Any]) -> str:
    if not micro_batches:
        raise InputError("there is no micro-batch", hint="pass a list of at least two")
    shapes = [BatchForm(each).words for each in micro_batches]
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise InputError(
                f"micro-batch 0 is {shapes[0]} and micro-batch {index} is {shape}, and those of "
                "one step are alike",
                hint=_ALIKE,
            )
    return shapes[0]
