"""Context parallelism: ranks share each sequence, and only attention looks across.

A model names a role for each sub-module that cares where its tokens stand; all others work on any
tokens. Roles:

    attention  a `CausalAttention`; replaced by Ulysses or ring attention over the ranks
    positions  holds buffers (or is an embedding table) with one row per position, along
               dimension 0; it keeps the rows of the rank's own positions, in their order

Every parameter stays whole. Each rank's gradients come from its own tokens: their sum over ranks
is the gradient, as among data-parallel ranks.
"""

import fnmatch
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import InputError, nearest
from interlace.models.attention import CausalAttention
from interlace.parallel.own_buffers import mark_own
from interlace.parallel.ring import RingAttention
from interlace.parallel.ulysses import UlyssesAttention

METHODS = ("ulysses", "ring")
"""Ways to attend across ranks: the values of `parallel.context_method`."""
ROLES = ("attention", "positions")
"""The roles that a model's `CONTEXT_PLAN` may give to a sub-module."""


def local_positions(sequence_length: int, ranks: int, rank: int, method: str) -> Tensor:
    """Which tokens of a sequence a rank holds, in its order [sequence_length / ranks].

    Ulysses cuts the sequence into one chunk per rank; ring into two, and rank r holds chunks r
    and 2 ranks - 1 - r. Raises InputError if it cannot be cut so.
    """
    if method not in METHODS:
        raise InputError(
            f"parallel.context_method = {method!r} is not a method", hint=nearest(method, METHODS)
        )
    pieces = ranks * (2 if method == "ring" else 1)
    if sequence_length % pieces:
        raise InputError(
            f"a sequence of {sequence_length} tokens cannot be cut into {pieces} equal chunks "
            f"({method} on {ranks} ranks)",
            hint=f"set data.sequence_length to a multiple of {pieces}",
        )
    chunks = torch.arange(sequence_length).chunk(pieces)
    return torch.cat((chunks[rank], chunks[-1 - rank])) if method == "ring" else chunks[rank]


def apply_context_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: dict[str, str], method: str, sequence_length: int
) -> None:
    """Let `model` work on a rank's `local_positions` of each sequence, in place.

    `mesh` is one-dimensional; `plan` gives roles by pattern of module names. Call it before
    tensor parallelism is applied. Raises InputError for a plan that does not fit the model.
    """
    if mesh.size() == 1:
        return
    positions = local_positions(sequence_length, mesh.size(), mesh.get_local_rank(), method)
    if "attention" not in plan.values():
        raise InputError(
            "parallel.context needs to know the model's attention, and its plan names none",
            hint="give the module that mixes positions the role 'attention'",
        )
    done: set[int] = set()
    for name, role in _modules(model, plan):
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        module = getattr(owner, child)
        if role == "attention":
            setattr(owner, child, mark_own(_attention(name, module, mesh, method), mesh))
        elif id(module) not in done:
            done.add(id(module))
            cut = _cut(name, module, positions, sequence_length)
            setattr(owner, child, mark_own(cut, mesh))


def _modules(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(name, role) of every module that a pattern names; `*` stands for one part of a name."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern, role in plan.items():
        if role not in ROLES:
            raise InputError(
                f"context parallelism knows no role {role!r} (of {pattern!r})",
                hint=nearest(role, ROLES),
            )
        found = [n for n in fnmatch.filter(names, pattern) if n.count(".") == pattern.count(".")]
        if not found:
            raise InputError(
                f"no module of the model is named {pattern!r} (role {role!r})",
                hint=nearest(pattern, names),
            )
        yield from ((name, role) for name in found)


def _attention(name: str, module: nn.Module, mesh: DeviceMesh, method: str) -> nn.Module:
    if not isinstance(module, CausalAttention):
        raise InputError(
            f"{name} has the role 'attention' and is a {type(module).__name__}",
            hint="let the model call an interlace.models.attention.CausalAttention there",
        )
    if method == "ulysses":
        return UlyssesAttention(module, mesh)
    return RingAttention(mesh, torch.device(mesh.device_type))


def _cut(name: str, module: nn.Module, positions: Tensor, sequence_length: int) -> nn.Module:
    """`module` with buffers of the rank's own positions only."""
    if isinstance(module, nn.Embedding):
        _check_rows(name, module.num_embeddings, sequence_length)
        return LocalEmbedding(module, positions)
    buffers = list(module.named_buffers())
    if not buffers:
        raise InputError(
            f"{name} has the role 'positions' and holds no buffer",
            hint="keep what belongs to positions in buffers with one row per position",
        )
    for path, buffer in buffers:
        _check_rows(f"{name}.{path}", buffer.shape[0] if buffer.dim() else 0, sequence_length)
        parent, _, child = path.rpartition(".")
        rows = buffer.index_select(0, positions.to(buffer.device))
        setattr(module.get_submodule(parent), child, rows)
    return module


def _check_rows(name: str, rows: int, sequence_length: int) -> None:
    if rows < sequence_length:
        raise InputError(
            f"{name} has {rows} rows and cannot be indexed by {sequence_length} positions",
            hint="only modules with one row per position have the role 'positions'",
        )


class LocalEmbedding(nn.Module):
    """An embedding table of positions that is asked by the index of a token among the rank's own.

    The table stays whole, so that it is the same parameter as on one device.
    """

    positions: Tensor

    def __init__(self, table: nn.Embedding, positions: Tensor) -> None:
        super().__init__()
        self.weight = table.weight
        own = positions.to(table.weight.device)
        self.register_buffer("positions", own, persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        """[...] -> [..., width]."""
        return F.embedding(self.positions[index], self.weight)
