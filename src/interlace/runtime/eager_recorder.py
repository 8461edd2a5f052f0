"""Record plain eager autograd as a Timeline: the picture of what a user has today.

A dispatch mode sees every operator that DTensor runs on local tensors, forward and backward. A
collective's end is observed only when the rank waits for it; if it was already over when
the wait began, the wait's start is noted as a bound (`end_known=False`).
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from interlace.graphs.collectives import ISSUE, WAIT
from interlace.graphs.export import kind_of_target
from interlace.ir.graph import COMPUTE_LANE
from interlace.ir.timeline import WAIT as WAIT_KIND
from interlace.ir.timeline import Span, Timeline


class EagerRecorder(TorchDispatchMode):
    """Collects spans while active. CPU only: it takes host time as operator time."""

    def __init__(self, axis_of_group: Mapping[str, str]) -> None:
        super().__init__()
        self.axis_of_group = axis_of_group
        self.strand = "forward"
        self.micro_batch = 0
        self.spans: list[Span] = []
        self._flying: dict[int, tuple[str, str, str, int, int]] = {}
        self._lane_free: dict[str, int] = {}
        self._origin = time.perf_counter_ns()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Stamp operators on plain tensors; DTensor comes back here with its local ones."""
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented
        start = time.perf_counter_ns() - self._origin
        result = func(*args, **(kwargs or {}))
        end = time.perf_counter_ns() - self._origin
        name = f"{str(func).split('.')[1]}_{len(self.spans)}"
        if func == WAIT:
            self._waited(args[0], start, end)
        elif func in ISSUE:
            kind, lane = ISSUE[func][1], self.axis_of_group.get(str(args[-1]), "?")
            size = max(_bytes(args), _bytes(result))
            self._flying[_pointer(result)] = (name, kind, lane, start, size)
            self._compute(name, kind, start, end)
        else:
            self._compute(name, kind_of_target(func), start, end)
        return result

    def _compute(self, name: str, kind: str, start: int, end: int) -> None:
        self.spans.append(Span(name, kind, COMPUTE_LANE, start, end, self.strand, self.micro_batch))

    def _waited(self, tensor: torch.Tensor, start: int, end: int) -> None:
        flying = self._flying.pop(_pointer(tensor), None)
        if flying is None:
            return
        name, kind, lane, issue, size = flying
        blocked = end - start > BLOCKED_NS
        done = end if blocked else start
        begin = min(max(issue, self._lane_free.get(lane, 0)), done)
        self._lane_free[lane] = max(done, self._lane_free.get(lane, 0))
        common = {"strand": self.strand, "micro_batch": self.micro_batch}
        self.spans.append(Span(name, WAIT_KIND, COMPUTE_LANE, start, end, **common))
        self.spans.append(
            Span(name, kind, lane, begin, done, issue_ns=issue, bytes=size, end_known=blocked,
                 **common)
        )  # fmt: skip

    def timeline(self, label: str, rank: int) -> Timeline:
        """What was recorded, from time 0."""
        return Timeline(label, rank, tuple(self.spans))


BLOCKED_NS = 50_000
"""A wait longer than this found its collective still in flight; a finished one takes about 5 us."""


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(value: Any) -> int:
    leaves = tree_leaves(value)
    return sum(t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor))
