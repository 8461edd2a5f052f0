"""A user's module as a step needs it: traced with its loss, and its tensors watched."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from interlace.graphs.fsdp_private import FullyShardedModule
from interlace.parallel.expert import dealt_over, dealt_parameters
from interlace.parallel.local_parts import local
from interlace.runtime.batch_form import BatchForm
from interlace.runtime.binding import ModuleBinding
from interlace.runtime.clipping import total_norm
from interlace.runtime.executor import Batch
from interlace.runtime.gradients import ParameterGradients
from interlace.runtime.handovers import Handovers
from interlace.runtime.replicated_module import ReplicatedModule
from interlace.runtime.same_module import ModuleAgreement
from interlace.runtime.stage_link import StageLink
from interlace.runtime.step_inputs import check_batches

Constants = Mapping[tuple[str, str], Tensor]
"""What the graphs' inputs stand for, by (role, target): weights, buffers, gradient sums."""
LossFunction = Callable[..., Tensor | tuple[Tensor, ...]]
"""Takes the module and a batch, and gives a scalar, or a tuple of it and of results."""


class UserModule:
    """The tensors of a user's module, as a step needs them: still those that it was compiled for,
    with gradients under autograd's rules. See `step.StepTensors`."""

    def __init__(
        self,
        chunk: "ModuleWithLoss",
        gradients: ParameterGradients,
        binding: ModuleBinding,
        form: BatchForm,
        alike: ModuleAgreement,
        sharded: FullyShardedModule | None = None,
        replicas: ReplicatedModule | None = None,
    ) -> None:
        """`sharded` is the module as FSDP2 has it, if it does, and `replicas` the wrapper that
        averages gradients, if the user gave one."""
        self._chunk = chunk
        self._gradients = gradients
        self._binding = binding
        self._form = form
        self._sharded = sharded
        self._replicas = replicas
        self._example = form.example
        self.check_ranks = alike.check

    @property
    def constants(self) -> Constants:
        """Parameters and gradient sums, by (role, target)."""
        return self._gradients.constants

    def share_sums(self, other: "UserModule") -> None:
        """Keep gradients in the sums of another step on the same module."""
        self._gradients.share(other._gradients)

    @property
    def chunk(self) -> "ModuleWithLoss":
        """The module with its loss, for autograd."""
        return self._chunk

    def parameters(self, handovers: Handovers | None) -> dict[str, nn.Parameter]:
        """Those that this rank's stage uses, by the user's names."""
        named = self._chunk.named_parameters()
        held = None if handovers is None or handovers.is_alone else handovers.held
        return {
            name.removeprefix("module."): each
            for name, each in named
            if held is None or name in held
        }

    def free_all_but(self, kept: Mapping[str, nn.Parameter]) -> int:
        """Give back the memory of all other parameters; its bytes. What torch has not allocated,
        such as a mapped file, is not its to give."""
        used = [*kept.values(), *self._chunk.buffers()]
        addresses = {local(each).untyped_storage().data_ptr() for each in used}
        freed = 0
        for parameter in self._chunk.parameters():
            storage = local(parameter).untyped_storage()
            if storage.data_ptr() not in addresses and storage.resizable():
                freed += storage.nbytes()
                storage.resize_(0)
        self._binding.accept()
        return freed

    def gradients(self, names: Collection[str]) -> list[Tensor]:
        """Those of these parameters, after a step."""
        return self._gradients.given(names)

    def norm(self, handovers: Handovers | None, link: StageLink | None) -> Tensor:
        """That of all gradients of the model."""
        names = sorted(self._gradients.names)
        if handovers is not None and link is not None:
            names = [name for name in names if handovers.owner(name) == handovers.rank]
        dealt = dealt_parameters(self._chunk)
        found = self.gradients([name for name in names if name not in dealt])
        for mesh in dealt_over(self._chunk).values():  # one, as `mesh_axes.expert_group` sees to
            own = self.gradients([name for name in names if name in dealt])
            found += [DTensor.from_local(each, mesh, (Shard(0),)) for each in own]
        return total_norm(found, link, self._example[0].device)

    def flat(self, batches: Sequence[Any]) -> list[Batch]:
        """The tensors of micro-batches. Raises InputError for one of another form than the
        example's."""
        if self._form.is_plain:
            return list(batches)
        return [self._form.flat(each, f"micro-batch {n}") for n, each in enumerate(batches)]

    def refresh(self, batches: Sequence[Batch]) -> bool:
        """Whether parameters or buffers were replaced. Raises InputError for micro-batches unlike
        the example, and RunError for a module that is no longer what was compiled."""
        check_batches(batches, self._example)
        if self._sharded is not None:
            self._sharded.reshard()
        if self._replicas is not None:
            self._replicas.take_buffers()
        replaced = self._binding.check()
        if replaced:
            self._gradients.rebind(self._chunk)
        return self._gradients.refresh() or replaced

    def begin(self, batches: Sequence[Batch]) -> bool:
        """The same, before a step, which adds to gradients."""
        if self._replicas is not None:
            self._replicas.begin()
        replaced = self.refresh(batches)
        self._gradients.begin()
        return replaced

    def finish(self) -> None:
        """Put the gradients into `parameter.grad`."""
        self._gradients.finish()


class ModuleWithLoss(nn.Module):
    """The module with its loss, which is traced as one."""

    def __init__(
        self, module: nn.Module, loss_fn: LossFunction, form: BatchForm | None = None
    ) -> None:
        """`form` puts batches together for `loss_fn`; without it they are tuples of tensors."""
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn
        self.arguments = None if form is None or form.is_plain else form.arguments

    def forward(self, *batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        """A scalar, equal on all ranks of the mesh that share it; with what `loss_fn` gives beside
        it, if it gives a tuple."""
        given = batch if self.arguments is None else self.arguments(batch)
        loss = self.loss_fn(self.module, *given)
        if isinstance(loss, tuple):
            return _whole(loss[0]), *(_whole(each).detach() for each in loss[1:])
        return _whole(loss)


def _whole(value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        everywhere = [Replicate()] * value.device_mesh.ndim
        return value.redistribute(placements=everywhere).to_local()
    return value
