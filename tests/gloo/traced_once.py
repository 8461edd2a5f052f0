"""One trace for several steps of equal modules: most of the time of a small test is tracing, and a
trace knows nothing of schedules, plans, strands, recomputation and decomposed collectives, which
are what such a test varies."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from interlace.graphs.repeat import Repeated
from interlace.graphs.trace import ChunkGraphs, StrandGraph
from interlace.runtime import traced_strands

Found = ChunkGraphs | Repeated


@contextmanager
def traced_once() -> Iterator[None]:
    """Inside, a module is traced unless one was that is built, laid out and called in the same way:
    it gets copies of its graphs, as passes over graphs change them. What Python state the forward
    read is watched on the first module alone, so it is not for tests that change that."""
    kept: dict[Any, Found] = {}

    def first(name: str, trace: Callable[..., Found]) -> Callable[..., Found]:
        def found(module: nn.Module, example: tuple[Tensor, ...], **options: Any) -> Found:
            key = (name, _looks(module, example), *sorted(options.items()))
            if key not in kept:
                kept[key] = trace(module, example, **options)
            return _copied(kept[key])

        return found

    names = ("trace_repeated", "trace_chunk")
    tracers = {name: first(name, getattr(traced_strands, name)) for name in names}
    with patch.multiple(traced_strands, **tracers):
        yield


def _looks(module: nn.Module, example: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """What a module is made of, and what it is called with."""
    parts = tuple((name, type(part)) for name, part in module.named_modules())
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    laid_out = tuple((name, _layout(tensor)) for name, tensor in tensors)
    return module.training, parts, laid_out, tuple(map(_layout, example))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad
    if not isinstance(tensor, DTensor):
        return plain
    mesh = tensor.device_mesh
    groups = tuple(group.group_name for group in mesh.get_all_groups())
    return *plain, tensor.placements, groups


def _copied(found: Found) -> Found:
    if isinstance(found, Repeated):
        return found._replace(chunk=_copied(found.chunk))
    return replace(found, forward=_own(found.forward), backward=_own(found.backward))


def _own(strand: StrandGraph) -> StrandGraph:
    return replace(strand, module=fx.GraphModule(strand.module, copy.deepcopy(strand.graph)))
