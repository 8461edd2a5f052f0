"""Gradients of a module under `fully_shard`: flat sums of each group, handed out as FSDP2 does it.

A gradient is a view of its group's sums, a DTensor that lies as its parameter does, so that the
user's optimizer, `clip_grad_norm_` and later steps of FSDP2 itself take it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from interlace.graphs.fsdp_exchange import gradient_places
from interlace.parallel.fsdp_groups import GroupWeight, WeightGroup, WeightGroups
from interlace.parallel.local_parts import local
from interlace.runtime.gradients import ParameterGradients


class GroupGradients(ParameterGradients):
    """`ParameterGradients` of weights in groups. Parts of weights are FSDP2's own memory."""

    def __init__(
        self, module: nn.Module, names: Sequence[str], layout: WeightGroups, dtype: torch.dtype
    ) -> None:
        """`module` is the traced one, not as it was traced; `names` are its parameters that get a
        gradient; sums are kept in `dtype`."""
        super().__init__(module, (), {}, dtype)
        self._layout = layout
        self._places = {group: gradient_places(group, names) for group in layout.groups}
        self.constants = {
            key: part for key, part in self.constants.items() if key[1] not in layout.names
        }
        for group in layout.groups:
            if self._places[group]:
                self.constants[group.sum_key] = _sums(group, self._places[group], dtype)
        self._look_again()

    @property
    def names(self) -> frozenset[str]:
        """The parameters that get a gradient, each under one name."""
        return frozenset(w.name for places in self._places.values() for w, _ in places)

    def share(self, other: ParameterGradients) -> None:
        """Nothing: sums are views into those of groups, and small, being shards."""

    def refresh(self) -> bool:
        """Look for parts of weights that have other memory than before; whether there are any."""
        changed = False
        for group in self._layout.groups:
            for weight in group.weights:
                key, now = group.shard_key(weight), weight.shard()
                changed |= self.constants.get(key) is not now
                self.constants[key] = now
        return changed

    def rebind(self, module: nn.Module) -> None:
        """Take over replaced parameters. Gradients that those before were given stay theirs: their
        group gets other sums."""
        now = dict(module.named_parameters(remove_duplicate=False))
        for group, places in self._places.items():
            olds = [self._parameters[weight.name] for weight, _ in places]
            taken = [
                old
                for (weight, _), old in zip(places, olds, strict=True)
                if now[weight.name] is not old and self._is_in_sums(old)
            ]
            if taken:
                self.constants[group.sum_key] = torch.zeros_like(self.constants[group.sum_key])
        self._parameters = now
        self.constants |= {
            (role, name): local(now[name]) for role, name in self.constants if role == "parameter"
        }
        self._look_again()

    def _look_again(self) -> None:
        """Of the parameters and sums that there are now: gradients, how they lie, and parts."""
        self._buffers = {
            self._parameters[weight.name]: _view(self.constants, group, weight, start)
            for group, places in self._places.items()
            for weight, start in places
        }
        self._layouts = {
            each: each.placements for each in self._buffers if isinstance(each, DTensor)
        }
        self.refresh()

    def _is_in_sums(self, parameter: nn.Parameter) -> bool:
        grad, buffer = parameter.grad, self._buffers[parameter]
        return grad is not None and local(grad).data_ptr() == buffer.data_ptr()


def _sums(
    group: WeightGroup, places: Sequence[tuple[GroupWeight, int]], dtype: torch.dtype
) -> Tensor:
    elements = sum(weight.part_elements for weight, _ in places)
    device = group.weights[0].shard().device
    return torch.zeros(elements, dtype=dtype, device=device)


def _view(
    constants: Mapping[tuple[str, str], Tensor], group: WeightGroup, weight: GroupWeight, start: int
) -> Tensor:
    return constants[group.sum_key].as_strided(weight.own, weight.own_stride, start)
