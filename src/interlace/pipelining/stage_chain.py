"""The stages of all ranks as one module, and which rank passes which of its inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from interlace.errors import InputError
from interlace.pipelining.stage_exchange import Described, RankSide

_Given = tuple[bool, Any]
"""Whether an argument is an input of the step, and its index, or else the value."""


@dataclass(frozen=True)
class ChainInput:
    """A tensor that a step takes for each micro-batch."""

    rank: int
    """The rank of the pipeline that passes it."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def blank(self, device: torch.device) -> Tensor:
        """Zeros of this shape, in the memory of one number."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


@dataclass
class ChainInputs:
    """All of them, in the order in which the step takes them, and what they are for."""

    inputs: list[ChainInput] = field(default_factory=list)
    args: list[_Given] = field(default_factory=list)
    kwargs: list[dict[str, _Given]] = field(default_factory=list)
    """By rank."""
    target: list[_Given] = field(default_factory=list)
    loss_kwargs: dict[str, _Given] = field(default_factory=dict)

    @classmethod
    def of(cls, sides: Sequence[RankSide], first: int, last: int) -> "ChainInputs":
        """What these ranks pass; `first` and `last` are those of the first and the last stage."""
        found = cls()
        found.args = [found._take(each, first) for each in sides[first].args]
        for rank, side in enumerate(sides):
            found.kwargs.append(found._takes(side.kwargs, rank))
        found.target = [found._take(each, last) for each in sides[last].target]
        found.loss_kwargs = found._takes(sides[last].loss_kwargs, last)
        return found

    def _takes(self, named: Mapping[str, Described], rank: int) -> dict[str, _Given]:
        return {name: self._take(each, rank) for name, each in sorted(named.items())}

    def _take(self, described: Described, rank: int) -> _Given:
        if described.shape is None or described.dtype is None:
            return False, described.value
        self.inputs.append(ChainInput(rank, described.shape, described.dtype))
        return True, len(self.inputs) - 1


class StageChain(nn.Module):
    """Stages that hand what they give to the next one, as their positional arguments."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        args: Sequence[_Given],
        kwargs: Sequence[Mapping[str, _Given]],
    ) -> None:
        """`kwargs` are those of each stage."""
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._args = list(args)
        self._kwargs = [dict(each) for each in kwargs]

    def forward(self, *batch: Tensor) -> Any:
        """What the last stage gives."""
        values = [batch[each] if is_input else each for is_input, each in self._args]
        output: Any = None
        for stage, named in zip(self.stages, self._kwargs, strict=True):
            given = {
                name: batch[each] if is_input else each for name, (is_input, each) in named.items()
            }
            output = stage(*values, **given)
            values = list(output) if isinstance(output, (tuple, list)) else [output]
        return output


class ChainLoss(nn.Module):
    """The loss of a chain, with the output of its last stage beside it."""

    def __init__(self, loss_fn: Any, target: Sequence[_Given], named: Mapping[str, _Given]) -> None:
        """Without `loss_fn` the sum of the output stands in, as a step is traced by its loss."""
        super().__init__()
        self.loss_fn = loss_fn
        self._target = list(target)
        self._named = dict(named)

    def forward(self, chain: nn.Module, *batch: Tensor) -> tuple[Tensor, ...]:
        """The loss, and the tensors of the output."""
        output = chain(*batch)
        flat = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        if self.loss_fn is None:
            return flat[0].sum(), *flat
        target = [batch[each] if is_input else each for is_input, each in self._target]
        given = {
            name: batch[each] if is_input else each
            for name, (is_input, each) in self._named.items()
        }
        return self.loss_fn(output, *target, **given), *flat


def check_output(output: Any) -> type | None:
    """The type of container in which the last stage gives its tensors, None for a tensor alone.
    Raises InputError for anything else."""
    if isinstance(output, Tensor):
        return None
    kind = type(output)
    if kind not in (tuple, list) or not all(isinstance(each, Tensor) for each in output):
        raise InputError(
            f"the last stage gives a {kind.__name__}, not a tensor or a tuple of tensors",
            hint="return tensors",
        )
    return kind
