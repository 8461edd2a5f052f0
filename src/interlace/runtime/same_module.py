"""What the ranks that compile a step of a user's module must hold alike."""

import fnmatch
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.errors import InputError, nearest
from interlace.parallel.expert import dealt_parameters
from interlace.parallel.meshes import EXPERT_AXIS, PIPELINE_AXIS, REPLICATE_AXIS
from interlace.ranks.agree import Content, check_agreement, check_contents, environment_fields
from interlace.ranks.replicas import Places, tensor_contents
from interlace.ranks.small_collectives import alone
from interlace.ranks.source_files import module_contents, package_contents
from interlace.runtime.traced_strands import Strands

_WEIGHTS_HINT = (
    "build the module from the same seed or file on all ranks; if each rank is to hold its own, "
    "make it a sharded DTensor, or name it in compile_step(per_rank=...)"
)
"""Hint where ranks hold different weights or buffers."""
_SEED_HINT = (
    "call torch.manual_seed with one number on the ranks that share a sample, before compile_step"
)
"""Hint where ranks that share a sample draw different masks of dropout."""


class ModuleAgreement:
    """Compares a module's weights and buffers, its code, and seeds, over the ranks of a mesh.

    Without a mesh the ranks are those of the default group. Checks are collective on the group that
    is given, by default on that one, and raise PeerError on all its ranks alike.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh | None,
        per_rank: Collection[str],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`per_rank` holds patterns of names; `group` are the ranks that trace the same graphs, by
        default all. Raises InputError for one that names no plain
        parameter or buffer."""
        self.module = module
        self.mesh = mesh
        self._group = group
        self._ranks = None if mesh is None else mesh.mesh.flatten().tolist()
        self._per_rank = _plain_names(module, per_rank)
        self._dealt = frozenset(dealt_parameters(module))

    def check_software(self, *functions: Any) -> None:
        """Versions, and the files of interlace, of the module's classes and of `functions`."""
        if alone(self._group):
            return
        check_agreement(environment_fields(), group=self._group)
        contents = package_contents() + module_contents(self.module, *functions)
        check_contents(contents, group=self._group)

    def check_traced(self, strands: Strands) -> None:
        """Graphs, parameters, buffers and, if there is dropout, seeds."""
        check_agreement({"graph": strands.measured.digest}, group=self._group)
        self.check()
        self._check_seeds(strands.measured)
        if self.mesh is not None and PIPELINE_AXIS in (self.mesh.mesh_dim_names or ()):
            # From now on a rank's optimizer changes the weights of its own stage only.
            axis = (self.mesh.mesh_dim_names or ()).index(PIPELINE_AXIS)
            stage = self.mesh.mesh.narrow(axis, self.mesh.get_local_rank(axis), 1)
            self._ranks = stage.flatten().tolist()

    def check(self) -> None:
        """Parameters and buffers as they are now."""
        parameters = dict(self.module.named_parameters())
        buffers = {
            name: each for name, each in self.module.named_buffers() if name not in self._per_rank
        }
        named = {f"parameter {name!r}": each for name, each in parameters.items()}
        named |= {f"buffer {name!r}": each for name, each in buffers.items()}
        contents = tensor_contents(named, group=self._group, own=self._own(), ranks=self._ranks)
        check_contents(contents, group=self._group, hint=_WEIGHTS_HINT)

    def _check_seeds(self, strands: Strands) -> None:
        """torch's seed, where ranks that exchange activations draw masks of dropout from it."""
        if self.mesh is None or not strands.takes_seeds:
            return
        sharing = strands.forward_lanes - {EXPERT_AXIS}  # its ranks see other samples
        if not sharing:
            return
        part = f"among {self._ranks} {self._place(sharing)}"
        seed = str(torch.initial_seed())
        content = Content(
            name="torch.initial_seed()", digest=seed.encode(), shown=seed, layout="seed", part=part
        )
        check_contents([content], group=self._group, hint=_SEED_HINT)

    def _own(self) -> Places:
        """Parameters that differ from rank to rank are equal on replicas all the same, which
        average their gradients."""
        if self.mesh is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            place = (("ranks", rank),)
        else:
            place = self._place({REPLICATE_AXIS})
        return {f"parameter {name!r}": place for name in (*self._per_rank, *self._dealt)}

    def _place(self, without: Collection[str]) -> tuple[tuple[str, int], ...]:
        """This rank's numbers on the axes of the mesh, but for some."""
        assert self.mesh is not None
        names = self.mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(self.mesh.ndim))
        return tuple(
            (name, self.mesh.get_local_rank(axis))
            for axis, name in enumerate(names)
            if name not in without
        )


def _plain_names(module: nn.Module, patterns: Collection[str]) -> frozenset[str]:
    if isinstance(patterns, str):
        raise InputError(
            f"per_rank = {patterns!r} is a text, not a list of names",
            hint=f"give per_rank=[{patterns!r}]",
        )
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    plain = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    found: set[str] = set()
    for pattern in patterns:
        named = fnmatch.filter(plain, pattern)
        if not named:
            raise InputError(
                f"per_rank names {pattern!r}, and no plain parameter or buffer is called so",
                hint="the layout of a DTensor says itself what is equal; "
                + nearest(pattern, plain),
            )
        found.update(named)
    return frozenset(found)
