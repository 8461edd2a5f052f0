"""The step behind a PipelineSchedule: all stages as one model, traced, and cut between them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from interlace.api import compile_step, free_other_stages
from interlace.config import OverlapConfig, PlanConfig
from interlace.errors import InputError
from interlace.graphs.torch_private import fake_tensor_mode
from interlace.parallel.meshes import PIPELINE_AXIS
from interlace.pipelining.stage_chain import ChainInputs, ChainLoss, StageChain, check_output
from interlace.pipelining.stage_exchange import Described, RankSide, unpacked
from interlace.ranks.agree import refused_together
from interlace.schedules.finder import Schedule

Call = tuple[Sequence[Any], Mapping[str, Any], Sequence[Any]]
"""What a rank passes for a micro-batch: args, kwargs and target."""


class ChainStep:
    """A compiled step of the stages of all ranks."""

    def __init__(
        self,
        side: RankSide,
        own: Mapping[int, nn.Module],
        loss_fn: Any,
        device: torch.device,
        mesh: DeviceMesh,
        *,
        schedule: Schedule,
        config: PlanConfig | None,
        overlap: OverlapConfig | None,
    ) -> None:
        """`side` is what this rank brings, `own` its modules by their numbers in the pipeline. The
        other modules are held with zeros until the step is compiled, and then without memory.
        Collective on the default group."""
        self._group = mesh.get_group(PIPELINE_AXIS)
        self._rank = dist.get_rank(self._group)
        self._device = device
        sides: list[RankSide] = self._gathered(side)
        rank_of = {stage: rank for rank, each in enumerate(sides) for stage in each.stages}
        self.is_last = rank_of[max(rank_of)] == self._rank
        self._is_first = rank_of[0] == self._rank
        self._side, self._has_loss = side, loss_fn is not None
        self._layout = layout = ChainInputs.of(sides, rank_of[0], rank_of[max(rank_of)])
        with refused_together(self._group):
            modules = dict(own)
            for rank, each in enumerate(sides):
                if rank != self._rank:
                    modules |= zip(each.stages, unpacked(each.modules, device), strict=True)
            order = sorted(modules)
            kwargs = [layout.kwargs[rank_of[stage]] for stage in order]
            chain = StageChain([modules[stage] for stage in order], layout.args, kwargs)
            blanks = [each.blank(device) for each in layout.inputs]
            self._blanks = tuple(blanks)
            self._container = self._container_of(chain)
        loss = ChainLoss(loss_fn, layout.target, layout.loss_kwargs)
        example = tuple(each.contiguous() for each in blanks)
        self.step = compile_step(
            chain, loss, example, mesh=mesh, schedule=schedule.function, config=config,
            overlap=overlap, per_rank=_every(chain),
            split_at=[f"stages.{number}" for number in range(1, len(order))],
        )  # fmt: skip
        with refused_together(self._group):
            self._refuse_weights_of_others()
        if len(sides) > 1:
            free_other_stages(self.step)
        self._shared = self._inputs_of_others()

    def run(
        self,
        calls: Sequence[Call],
        loss_kwargs: Mapping[str, Any],
        *,
        backward: bool,
        keep_outputs: bool,
    ) -> tuple[list[Tensor], list[Any]]:
        """The losses of all micro-batches, and on the rank of the last stage its outputs if they
        are to be kept, else an empty list."""
        self.step.executor.keeps_results = keep_outputs
        batches = [self._batch(*call, loss_kwargs) for call in calls]
        for index in self._shared:
            self._share(batches, index)
        tuples = [tuple(batch) for batch in batches]
        if backward:
            self.step(tuples)
            losses = list(self.step.losses)
        else:
            self.step.evaluate(tuples)
            losses = list(self.step.evaluated)
        outputs = [self._contained(each) for each in self.step.results]
        self.step.executor.results = []
        return losses, outputs

    def _contained(self, tensors: tuple[Tensor, ...]) -> Any:
        return tensors[0] if self._container is None else self._container(tensors)

    def _batch(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: Sequence[Any],
        loss_kwargs: Mapping[str, Any],
    ) -> list[Tensor]:
        """The inputs of a micro-batch: what this rank passes, and zeros for what others do."""
        batch = list(self._blanks)
        layout = self._layout
        if self._is_first:
            _fill(batch, enumerate(args), dict(enumerate(layout.args)), "args")
        _fill(batch, kwargs.items(), layout.kwargs[self._rank], "kwargs")
        if self.is_last and self._has_loss:
            _fill(batch, enumerate(target), dict(enumerate(layout.target)), "target")
            _fill(batch, loss_kwargs.items(), layout.loss_kwargs, "loss_kwargs")
        return batch

    def _share(self, batches: Sequence[list[Tensor]], index: int) -> None:
        """Give an input to the ranks that do not pass it and have operators that read it."""
        given, link = self._layout.inputs[index], self.step.link
        assert link is not None
        for batch in batches:
            tensor = batch[index].contiguous()
            if given.rank != self._rank:
                tensor = torch.empty(given.shape, dtype=given.dtype, device=self._device)
            link.share(tensor, given.rank, f"input {index} of the pipeline")
            batch[index] = tensor

    def _inputs_of_others(self) -> list[int]:
        """The inputs that some rank reads and another one passes, such as a mask that stages hand
        through."""
        parts = self.step.strands.parts.values()
        bindings = [each for part in parts for each in part.inputs.values()]
        own = {int(each.target) for each in bindings if each.role == "batch"}
        own &= set(range(len(self._layout.inputs)))  # seeds of dropout come behind them
        read: list[set[int]] = self._gathered(own)
        return [
            index
            for index, each in enumerate(self._layout.inputs)
            if any(index in found for rank, found in enumerate(read) if rank != each.rank)
        ]

    def _refuse_weights_of_others(self) -> None:
        """Raise InputError if an operator of this rank reads a parameter or buffer of a stage of
        another one, of which there are no values here."""
        own = tuple(f"module.stages.{stage}." for stage in self._side.stages)
        for label, part in self.step.strands.parts.items():
            for binding in part.inputs.values():
                name = binding.target
                is_held = binding.role in ("parameter", "buffer")
                if is_held and name.startswith("module.stages.") and not name.startswith(own):
                    raise InputError(
                        f"{label} reads {name.removeprefix('module.')!r}, which is in a stage of "
                        "another rank",
                        hint="give the whole model to interlace.compile_step with a mesh axis pp",
                    )

    def _container_of(self, chain: nn.Module) -> Any:
        """In what the last stage gives its tensors, by a forward without numbers."""
        with fake_tensor_mode(holds_real=True), torch.no_grad():
            inputs = [torch.zeros(each.shape, dtype=each.dtype, device=self._device)
                      for each in self._layout.inputs]  # fmt: skip
            return check_output(chain(*inputs))

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, value, group=self._group)
        return found


def _every(chain: nn.Module) -> list[str]:
    """Patterns for all tensors, if there are some: each rank holds the values of its own stages."""
    return ["*"] if next(chain.parameters(), None) is not None else []


def _fill(batch: list[Tensor], given: Any, layout: Mapping[Any, Any], name: str) -> None:
    """Put tensors where they belong. Raises InputError for other arguments than in the first
    call."""
    values = dict(given)
    if values.keys() != layout.keys():
        raise InputError(
            f"{name} are {sorted(values)}, and were {sorted(layout)} in the first call",
            hint="pass the same arguments in every call",
        )
    for key, (is_input, known) in layout.items():
        value = values[key]
        if is_input and isinstance(value, Tensor):
            batch[known] = value
        elif is_input or Described.of(value) != Described(value=known):
            raise InputError(
                f"{name}[{key!r}] is {value!r:.80}, and was {'a tensor' if is_input else known!r} "
                "in the first call",
                hint="make what changes from step to step a tensor",
            )
