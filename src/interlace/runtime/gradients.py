"""Gradients of a user's own module: buffers that graphs add to, handed out as `parameter.grad`."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from interlace.parallel.local_parts import local
from interlace.parallel.tensor import finish_gradients


class ParameterGradients:
    """Local buffers of a module's gradients. Around a step call `begin` and `finish`; then
    gradients are in `parameter.grad` under autograd's rules: of the parameter's dtype and layout,
    and added to what was there before."""

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        placements: Mapping[str, tuple[Placement, ...] | None],
        dtype: torch.dtype,
        *,
        replicas: bool = False,
    ) -> None:
        """`module` is the traced one, which holds the user's under one name. `names` are the
        parameters that get a gradient, `placements` say how a rank's gradient lies on the
        parameter's mesh; sums are kept in `dtype`. With `replicas` a step sums them over ranks."""
        self._replicas = replicas
        everything = dict(module.named_parameters(remove_duplicate=False))
        self._parameters = everything
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self._layouts: dict[nn.Parameter, tuple[Placement, ...]] = {}
        self.constants = {("parameter", name): local(p) for name, p in everything.items()}
        """What the graphs' inputs stand for, by (role, target)."""
        for name in names:
            parameter = everything[name]
            if parameter not in self._buffers:
                self._buffers[parameter] = torch.zeros_like(local(parameter), dtype=dtype)
            if isinstance(parameter, DTensor):
                self._layouts[parameter] = placements[name] or parameter.placements
            self.constants["gradient", name] = self._buffers[parameter]
        self._before: dict[nn.Parameter, Tensor | None] = {}

    @property
    def names(self) -> frozenset[str]:
        """The parameters that get a gradient."""
        return frozenset(name for role, name in self.constants if role == "gradient")

    def given(self, names: Collection[str]) -> list[Tensor]:
        """The gradients of these parameters, after a step; each once."""
        having = self.names
        chosen = {self._parameters[name] for name in names if name in having}
        found = [each.grad for each in self._buffers if each in chosen]
        return [gradient for gradient in found if gradient is not None]

    def share(self, other: "ParameterGradients") -> None:
        """Add to the sums of `other`, of the same module, wherever they are of the same kind: of
        two steps that run in turn one set is enough. `constants` holds other tensors afterwards."""
        for key, own in self.constants.items():
            theirs = other.constants.get(key)
            if key[0] == "gradient" and theirs is not None and _alike(own, theirs):
                self.constants[key] = theirs
                self._buffers[self._parameters[key[1]]] = theirs

    def refresh(self) -> bool:
        """Whether a parameter has other memory than the module shows."""
        return False

    def rebind(self, module: nn.Module) -> None:
        """Take over the parameters of `module`, of which some were replaced by others of the same
        kind. A gradient that a replaced parameter was given stays its own."""
        now = dict(module.named_parameters(remove_duplicate=False))
        successor = {old: now[name] for name, old in self._parameters.items()}
        buffers = {}
        for old, buffer in self._buffers.items():
            grad = old.grad
            is_given = grad is not None and local(grad).data_ptr() == buffer.data_ptr()
            taken = is_given and successor[old] is not old
            buffers[successor[old]] = torch.zeros_like(buffer) if taken else buffer
        self._buffers = buffers
        self._layouts = {successor[old]: layout for old, layout in self._layouts.items()}
        self._parameters = now
        for role, name in self.constants:
            of_role = local(now[name]) if role == "parameter" else buffers[now[name]]
            self.constants[role, name] = of_role

    def begin(self) -> None:
        """Make the buffers ready: gradients that are still in them stay and are added to."""
        for parameter, buffer in self._buffers.items():
            before = parameter.grad
            kept = before is not None and local(before).data_ptr() == buffer.data_ptr()
            if kept and before is not None and self._replicas:
                before, kept = before.clone(), False  # it is a sum over ranks already
            self._before[parameter] = None if kept else before
            if not kept:
                buffer.zero_()

    @torch.no_grad()
    def finish(self) -> None:
        """Put the gradients into `parameter.grad`; sums over ranks that are due happen here."""
        for parameter, buffer in self._buffers.items():
            parameter.grad = self._laid_out(parameter, buffer)
        finish_gradients(self._buffers)
        for parameter, before in self._before.items():
            if before is not None:
                assert parameter.grad is not None
                before.add_(parameter.grad)
                parameter.grad = before
        self._before.clear()

    def _laid_out(self, parameter: nn.Parameter, buffer: Tensor) -> Tensor:
        gradient = buffer.to(parameter.dtype)
        if not isinstance(parameter, DTensor):
            return gradient
        layout = self._layouts[parameter]
        if layout != parameter.placements and gradient.data_ptr() == buffer.data_ptr():
            gradient = buffer.clone()  # a sum over ranks must not be taken for this rank's part
        return DTensor.from_local(
            gradient, parameter.device_mesh, layout,
            run_check=False, shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip


def _alike(one: Tensor, other: Tensor) -> bool:
    kinds = [(each.shape, each.stride(), each.dtype, each.device) for each in (one, other)]
    return kinds[0] == kinds[1]
