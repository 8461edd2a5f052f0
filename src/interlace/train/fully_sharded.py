"""What a user of ZeRO-3 has today: PyTorch's `fully_shard` on the same module, run eagerly."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from interlace.ir.timeline import Timeline
from interlace.parallel.data import DataLayout, cut
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import REPLICATE_AXIS, SHARD_AXIS, Meshes
from interlace.runtime.executor import Batch
from interlace.train.step_runners import loss_and_results
from interlace.train.weights import MasterWeights


def sharded_twin(module: nn.Module, meshes: Meshes, compute_dtype: torch.dtype) -> nn.Module:
    """A copy of a whole float32 `module` under `fully_shard`: one group per block, one for the
    rest. Weights are resharded after each forward."""
    twin = copy.deepcopy(module)
    axes = (REPLICATE_AXIS, SHARD_AXIS) if meshes.weights.size(0) > 1 else (SHARD_AXIS,)
    mesh = meshes.weights[axes] if len(axes) > 1 else meshes.weights[axes[0]]
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for child in list(twin.modules()):
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(twin, mesh=mesh, mp_policy=policy)
    return twin


class FullyShardedRunner:
    """Steps of a `sharded_twin`. Before a step it takes the masters over, afterwards it leaves its
    gradients in them, so that it can be compared with other runners."""

    def __init__(self, weights: MasterWeights, twin: nn.Module, layout: DataLayout) -> None:
        self.number = 0
        self.weights = weights
        self.twin = twin
        self.layout = layout
        self.losses: list[Tensor] = []
        self.results: list[tuple[Tensor, ...]] = []
        self._parameters = dict(twin.named_parameters())
        self._weights = {w.name: w for bucket in layout.buckets for w in bucket.weights}
        weights.on_publish.append(self._take_over)
        self._take_over()

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of each micro-batch in turn; gradients are reduced as often as the
        layout says."""
        twin: Any = self.twin
        for own, source in zip(twin.buffers(), self.weights.module.buffers(), strict=True):
            own.copy_(source)
        self.losses, self.results = [], []
        for parameter in self._parameters.values():
            parameter.grad = None
        for index, batch in enumerate(batches, 1):
            last = index == len(batches)
            twin.set_requires_gradient_sync(last or self.layout.reduce_each)
            twin.set_is_last_backward(last)
            loss, results = loss_and_results(twin(*batch))
            (loss / len(batches)).backward()
            self.losses.append(loss.detach())
            self.results.append(results)
        self._hand_over()
        return torch.stack(self.losses).mean()

    def record(self, batches: Sequence[Batch], label: str) -> Timeline | None:
        """The same step. Its transfers cannot be seen from outside, so there is no timeline."""
        self(batches)
        return None

    @torch.no_grad()
    def _take_over(self) -> None:
        for name, parameter in self._parameters.items():
            source, target = self.weights.masters[name], local(parameter)
            own = local(source)
            if self._weights[name].dim == 0 and own.shape == target.shape:
                target.copy_(own)
                continue
            whole = source.full_tensor() if isinstance(source, DTensor) else source
            ranks, rank = self.layout.buckets[0].shard.size, self.weights.shard_rank
            pieces = whole.chunk(ranks, dim=0)
            if rank < len(pieces):
                target.copy_(pieces[rank])

    @torch.no_grad()
    def _hand_over(self) -> None:
        for name, master in self.weights.masters.items():
            gradient = self._parameters[name].grad
            assert isinstance(gradient, DTensor)
            weight, part = self._weights[name], local(gradient)
            if weight.dim != 0 or part.shape != local(master).shape:
                whole = gradient.full_tensor()
                part = cut(weight, whole, self.weights.shard_rank)
            assert isinstance(master, DTensor)
            master.grad = DTensor.from_local(
                part.contiguous(), master.device_mesh, master.placements,
                run_check=False, shape=master.shape, stride=master.stride(),
            )  # fmt: skip
