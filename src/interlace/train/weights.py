"""Master weights: what the optimizer owns, always in float32.

With float32 compute they are the module's own parameters. With bfloat16 compute the module holds
bfloat16 copies, gradients are summed in float32 and `publish` rounds the masters into the copies
after each optimizer step. Where data-parallel ranks share weights, masters are DTensors on the
mesh of weights, and those of a sharded bucket are views of one flat tensor (`parallel.data`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from interlace.parallel.bucket_shards import BucketShards, laid_out
from interlace.parallel.data import DataLayout, views
from interlace.parallel.local_parts import local, stored, with_part
from interlace.parallel.meshes import Meshes
from interlace.parallel.stage_shards import StageShards
from interlace.parallel.tensor import finish_gradients
from interlace.ranks.agree import SAME_START, check_contents, refused_together
from interlace.ranks.replicas import module_buffers, tensor_contents
from interlace.runtime.executor import Batch

# Functional collectives are seen by the recorder of eager steps.
_functional = torch.ops._c10d_functional
_wait = _functional.wait_tensor


class MasterWeights:
    """Masters of a module's parameters, by name; parameters shared by two names appear once."""

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype,
        *,
        data: DataLayout | None = None,
        meshes: Meshes | None = None,
    ) -> None:
        """Casts the module to `compute_dtype` in place if that is not float32. With `data` the
        masters are this rank's share of them, on `meshes.weights`."""
        self.module = module
        self.data = data
        self.separate = compute_dtype != torch.float32
        self.dtype = next(module.parameters()).dtype
        """Of masters and gradient sums: float32, or that of a module that was made otherwise."""
        self.masters: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.group: dist.ProcessGroup | None = None
        """The ranks that have the same masters; None if all have them."""
        self.shards: StageShards | None = None
        """Of a stage whose ranks share its masters."""
        self.names = tuple(self.masters)
        """Of all masters of the model; in a pipeline this rank has some of them."""
        self.on_publish: list[Callable[[], None]] = []
        """Called with new masters, by runners that keep weights of their own."""
        whole = {name: parameter.detach() for name, parameter in self.masters.items()}
        if self.separate:
            whole = {name: parameter.clone() for name, parameter in whole.items()}
            cast_parameters(module, compute_dtype)
        if data is not None:
            assert meshes is not None
            self._shards = BucketShards(whole, data, meshes, compute_dtype)
            self.masters = self._shards.masters
        elif self.separate:
            self.masters = {name: nn.Parameter(tensor) for name, tensor in whole.items()}

    @property
    def shard_rank(self) -> int:
        """Which part of sharded weights this rank holds."""
        return self._shards.rank if self.data is not None else 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer gets."""
        return list(self.masters.values())

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into what graphs compute with. Sharded weights become whole again when
        they are gathered next."""
        if self.data is not None:
            self._shards.publish()
        if self.shards is not None:
            self.shards.publish()
        for follow in self.on_publish:
            follow()
        for name, parameter in self.module.named_parameters():
            is_sharded = self.data is not None and self._shards.is_sharded(name)
            is_sharded |= self.shards is not None and name in self.shards
            if is_sharded or name not in self.masters:
                continue
            source = local(self.masters[name])
            if source.data_ptr() != local(parameter).data_ptr():
                local(parameter).copy_(source)

    def keep(
        self,
        names: Collection[str],
        group: dist.ProcessGroup,
        meshes: Meshes,
        shards: int,
        gathered: DataLayout | None = None,
    ) -> None:
        """Be master of these parameters only, those of a stage, as all ranks of `group` are; before
        any gradient is summed. Of `shards` parts of each, be master of one; `gathered` are the
        buckets that graphs gather."""
        self.group = group
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        kept = {id(parameters[name]) for name in names}
        unique = self.module.named_parameters()
        of_stage = {name for name, parameter in unique if id(parameter) in kept}
        self.masters = {n: master for n, master in self.masters.items() if n in of_stage}
        if shards > 1 or meshes.experts is not None:
            self.shards = StageShards(self.module, self.masters, meshes, shards, gathered)
            self.masters = self.shards.masters

    @torch.no_grad()
    def free_others(self) -> int:
        """Free the module's parameters of other stages, which nothing may read any more; the number
        of bytes."""
        freed = 0
        if self.shards is not None:
            self.shards.free_others()
        for name, parameter in self.module.named_parameters():
            if name not in self.masters:
                storage = local(parameter).untyped_storage()
                freed += storage.nbytes()
                storage.resize_(0)
        return freed

    @torch.no_grad()
    def drop_whole(self) -> None:
        """Free the module's sharded parameters: graphs that gather them do not read them."""
        for name, parameter in self.module.named_parameters():
            if self.data is not None and self._shards.is_sharded(name):
                local(parameter).untyped_storage().resize_(0)
        if self.shards is not None:
            self.shards.free_whole()

    @torch.no_grad()
    def gather(self) -> None:
        """Make the module's sharded parameters whole, and as they were published last."""
        if self.data is None:
            return
        parameters = dict(self.module.named_parameters())
        for bucket in self.data.buckets:
            if not bucket.sharded:
                continue
            flat = self._shards.computing[bucket.index]
            ranks, group = bucket.shard.size, bucket.shard.group
            gathered = _wait(_functional.all_gather_into_tensor(flat, ranks, group))
            of_rank = [views(bucket, part) for part in gathered.view(ranks, -1)]
            for weight in bucket.weights:
                assert weight.dim is not None
                target = local(parameters[weight.name])
                target.untyped_storage().resize_(target.nbytes)
                parts = [found[weight.name] for found in of_rank]
                torch.cat(parts, dim=weight.dim, out=target)

    @torch.no_grad()
    def average(self, sums: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
        """What `set_gradients` takes, from whole gradient sums of this rank by parameter name: the
        mean over data-parallel ranks, of sharded weights this rank's part."""
        if self.data is None:
            return {("gradient", name): total for name, total in sums.items()}
        found: dict[tuple[str, str], Tensor] = {}
        for bucket in self.data.buckets:
            flat = torch.cat([sums[weight.name].reshape(-1) for weight in bucket.weights])
            for axis in (bucket.shard, bucket.replicate):
                if axis.size == 1:
                    continue
                flat = _wait(_functional.all_reduce(flat, "sum", axis.group))
            flat /= self.data.ranks
            pieces = flat.split([weight.elements for weight in bucket.weights])
            wholes = {
                weight: piece.view(weight.shape)
                for weight, piece in zip(bucket.weights, pieces, strict=True)
            }
            if bucket.sharded:
                key = ("shard_gradient", str(bucket.index))
                found[key] = self._shards.pack(wholes)
            else:
                found |= {("gradient", weight.name): whole for weight, whole in wholes.items()}
        return found

    def buffers(self) -> dict[tuple[str, str], Tensor]:
        """Zeroed float32 local gradient sums by (role, target): role `gradient` per parameter name
        of the module (names of one shared parameter share one sum), and `shard_gradient` per
        bucket. What the graphs do not add to, and what is of another stage, is left out."""
        found: dict[tuple[str, str], Tensor] = {}
        sharded = self._shards.is_sharded if self.data is not None else None
        shared: dict[nn.Parameter, Tensor] = {}
        unique = self.module.named_parameters()
        mastered = {parameter for name, parameter in unique if name in self.masters}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if self.data is not None and self.data.reduce_each and sharded and sharded(name):
                continue
            if parameter not in mastered:
                continue
            if parameter not in shared:
                part = local(parameter)
                shared[parameter] = torch.zeros_like(part, dtype=self.dtype)
            found["gradient", name] = shared[parameter]
        if self.data is not None:
            found |= {
                ("shard_gradient", str(index)): torch.zeros_like(flat)
                for index, flat in self._shards.flat.items()
            }
        return found

    def constants(self) -> dict[tuple[str, str], Tensor]:
        """What graphs compute with, by (role, target): parameters, and shards of buckets."""
        parameters = self.module.named_parameters(remove_duplicate=False)
        found = {("parameter", name): local(parameter) for name, parameter in parameters}
        if self.data is not None:
            shards = self._shards.computing
            found |= {("shard", str(index)): flat for index, flat in shards.items()}
        if self.shards is not None:
            found |= {("shard", str(index)): flat for index, flat in self.shards.flat.items()}
        return found

    def set_gradients(
        self,
        buffers: Mapping[tuple[str, str], Tensor],
        placements: Mapping[str, tuple[Placement, ...] | None],
    ) -> None:
        """Make `buffers` the masters' gradients, without a copy. `placements` says how each
        lies over the tensor-parallel ranks; missing names lie as their parameter does."""
        parts = {target: tensor for (role, target), tensor in buffers.items() if role == "gradient"}
        if self.data is not None:
            parts |= self._shards.gradients(buffers)
        for name, master in self.masters.items():
            part = parts[name] if self.shards is None else self.shards.gradient(name, parts[name])
            if not isinstance(master, DTensor):
                master.grad = part
                continue
            layout = placements.get(name)
            if layout and len(layout) < len(master.placements):
                layout = (*master.placements[:-1], layout[0])
            master.grad = laid_out(part, master.device_mesh, layout or master.placements, master)


class TrainedWeights:
    """Master weights as a step needs them: sums of gradients that begin at zero each time and
    become the masters' gradients. See `step.StepTensors`."""

    def __init__(
        self,
        weights: MasterWeights,
        placements: Mapping[str, tuple[Placement, ...] | None],
        constants: Mapping[tuple[str, str], Tensor],
    ) -> None:
        """`placements` are those of `MasterWeights.set_gradients`; `constants` are the weights'
        constants and buffers."""
        self.constants = constants
        self.sums = {key: tensor for key, tensor in constants.items() if "gradient" in key[0]}
        self._weights = weights
        self._placements = placements

    def flat(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """They are tuples of tensors."""
        return batches

    def refresh(self, batches: Sequence[Batch]) -> bool:
        """The masters never move."""
        return False

    def begin(self, batches: Sequence[Batch]) -> bool:
        """Sums begin at zero."""
        for total in self.sums.values():
            total.zero_()
        return self.refresh(batches)

    def finish(self) -> None:
        """Hand the sums to the masters."""
        self._weights.set_gradients(self.sums, self._placements)
        finish_gradients(self._weights.parameters)

    def check_ranks(self) -> None:
        """Raise PeerError for masters or buffers that have come to differ. Collective."""
        check_weights(self._weights)


def check_weights(
    weights: MasterWeights, hint: str = SAME_START, alike: dist.ProcessGroup | None = None
) -> None:
    """Raise PeerError for masters or buffers that have come to differ; `alike` are the ranks that
    hold the same buffers, by default all. Collective."""
    masters = {f"weight {name!r}": each for name, each in weights.masters.items()}
    own = tensor_contents(masters, group=weights.group)
    buffers = module_buffers(weights.module, alike)
    with refused_together():  # ranks of other stages have nothing to compare with these
        check_contents(own, group=weights.group, hint=hint)
    with refused_together():
        check_contents(buffers, group=alike, hint=hint)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters in `dtype`, in place; buffers keep theirs (rotary tables need float32)."""
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter not in cast:
                cast[parameter] = nn.Parameter(
                    _in_dtype(parameter, dtype), requires_grad=parameter.requires_grad
                )
            setattr(owner, name, cast[parameter])


def _in_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter.detach().to(dtype)
    # Of the part: an operator on a DTensor takes twice as long as one on a tensor.
    return with_part(parameter, stored(parameter).detach().to(dtype))
