"""A module under `DistributedDataParallel`: what that wrapper does, a step does.

It averages gradients over its process group by hooks of autograd, which a step does not have. So
the bare module is traced, its ranks are the axis `dp_replicate`, and sums of gradients are
operators of the graphs. What is left is done here: buffers come from the first rank before each
step, and states of the wrapper in which it would not average gradients are refused.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from interlace.errors import InputError, RunError
from interlace.graphs.torch_private import DDP_STATE, LOCALIZED
from interlace.parallel.meshes import PIPELINE_AXIS, REPLICATE_AXIS

_state = attrgetter(*DDP_STATE)


class ReplicatedModule:
    """A module and the wrapper that a user put around it."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        """Raises InputError naming what a step does not do."""
        self._wrapper = wrapper
        self.module: nn.Module = wrapper.module
        """The module in it, which is traced."""
        assert wrapper.process_group is not None
        self._group: dist.ProcessGroup = wrapper.process_group
        self._refuse_settings()

    def mesh(self, mesh: DeviceMesh | None, stages: Sequence[DeviceMesh]) -> DeviceMesh:
        """The mesh of a step: the user's, or one of the wrapper's ranks. Raises InputError for a
        mesh that does not average over the same ranks, and for stages of a pipeline."""
        group = self._group
        if mesh is None and not stages:
            kind = self._wrapper.device_type
            return DeviceMesh.from_group(group, kind, mesh_dim_names=(REPLICATE_AXIS,))
        names = (mesh.mesh_dim_names if mesh is not None else None) or ()
        if mesh is None or (PIPELINE_AXIS in names and mesh[PIPELINE_AXIS].size() > 1):
            raise InputError(
                "the module is under DistributedDataParallel, and the step is a pipeline",
                hint=f"leave the wrapper out: gradients are averaged over an axis {REPLICATE_AXIS}",
            )
        own = dist.get_process_group_ranks(group)
        found = [dist.get_rank()]
        if REPLICATE_AXIS in names:
            found = dist.get_process_group_ranks(mesh.get_group(REPLICATE_AXIS))
        if sorted(found) != sorted(own):
            raise InputError(
                f"DistributedDataParallel averages gradients over the ranks {own}, and mesh, with "
                f"the axes {', '.join(names) or 'of no names'}, over {found}",
                hint=f"name the axis of the wrapper's ranks {REPLICATE_AXIS}, or leave mesh out",
            )
        return mesh

    def per_rank(self, given: Collection[str]) -> Collection[str]:
        """What ranks may have of their own: beside what the user names, without
        `broadcast_buffers` all buffers."""
        if self._wrapper.broadcast_buffers or isinstance(given, str):
            return given
        return (*given, *(name for name, _ in self.module.named_buffers()))

    def begin(self) -> None:
        """Before a step, which averages gradients. Raises RunError where the wrapper would not."""
        wrapper = self._wrapper
        if changed := self._in_its_way():
            raise RunError(
                f"DistributedDataParallel got {' and '.join(changed)} after the step was compiled",
                hint="leave that out; all ranks run equally many steps",
            )
        if not wrapper.require_backward_grad_sync:
            raise RunError(
                "the step was called under no_sync() of DistributedDataParallel, and averages "
                "gradients over ranks",
                hint="give all micro-batches of an optimizer step to one call, outside of it",
            )
        held = (each.grad for each in self.module.parameters() if each.grad is not None)
        if not wrapper.require_forward_param_sync and any(bool(each.any()) for each in held):
            raise RunError(
                "the last forward of DistributedDataParallel was under no_sync() or no_grad(), and "
                "`.grad` may hold gradients that nobody has averaged over ranks",
                hint="give all micro-batches to the step, or call zero_grad() before it",
            )

    @torch.no_grad()
    def take_buffers(self) -> None:
        """Give buffers the values of the first rank, as the wrapper does before a forward.
        Collective on its ranks."""
        if not self._wrapper.broadcast_buffers or self._group.size() == 1:
            return
        by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for buffer in self.module.buffers():
            by_type[buffer.dtype].append(buffer)
        for buffers in by_type.values():
            flat = torch.cat([each.reshape(-1) for each in buffers])
            dist.broadcast(flat, group=self._group, group_src=0)
            parts = flat.split([each.numel() for each in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))

    def _in_its_way(self) -> list[str]:
        """What a user may do to the wrapper at any time, and a step does not follow."""
        hooks, joining = _state(self._wrapper)
        found = {
            "a communication hook": bool(hooks),
            "a hook for buffers": hasattr(self._wrapper, "buffer_hook"),
            "join()": joining.enable,
        }
        return [name for name, is_set in found.items() if is_set]

    def _refuse_settings(self) -> None:
        wrapper = self._wrapper
        localized = any(hasattr(each, LOCALIZED) for each in wrapper.parameters())
        refused = {
            "mixed_precision": wrapper.mixed_precision is not None,
            "parameters or buffers that it ignores or delays": bool(wrapper.parameters_to_ignore),
            "fully_shard in it": any(isinstance(each, FSDPModule) for each in wrapper.modules()),
            "tensor parallelism in it (device_mesh)": localized,
        }
        found = self._in_its_way() + [name for name, is_set in refused.items() if is_set]
        if found:
            raise InputError(
                f"the module is under DistributedDataParallel with {' and '.join(found)}, which a "
                "traced step does not do",
                hint="leave that out, or leave the wrapper out and name the axis of its ranks "
                f"{REPLICATE_AXIS} in mesh: gradients are averaged over it",
            )
