"""Record plain eager autograd as a Timeline: the picture of what a user has today.

A dispatch mode sees every operator that DTensor runs on local tensors, forward and backward. A
collective's end is observed only when the rank waits for it; if it was already over when
the wait began, the wait's start is noted as a bound (`end_known=False`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from interlace.graphs.collectives import WAIT, kind_of_collective, row_of
from interlace.graphs.op_graphs import kind_of_target
from interlace.graphs.torch_private import AsyncCollectiveTensor, TorchDispatchMode, tree_leaves
from interlace.ir.graph import COMPUTE_LANE, Kind
from interlace.ir.timeline import WAIT as WAIT_KIND
from interlace.ir.timeline import Span, Timeline
from interlace.runtime.recorder import Clock

BLOCKED_NS = 50_000
"""Time, in ns, of a wait beyond which it found its collective still in flight; a choice: a finished
one takes about 5 us."""


@dataclass(frozen=True)
class _Event:
    name: str
    kind: str
    strand: str
    micro_batch: int
    start: Any
    end: Any
    lane: str = COMPUTE_LANE
    bytes: int = 0
    issue: "_Event | None" = None
    """Of a wait: the collective that it waits for."""


class EagerRecorder(TorchDispatchMode):
    """Collects events while active."""

    def __init__(self, axis_of_group: Mapping[str, str], clock: Clock) -> None:
        super().__init__()
        self.axis_of_group = axis_of_group
        self.clock = clock
        self.strand = "forward"
        self.micro_batch = 0
        self._events: list[_Event] = []
        self._flying: dict[int, _Event] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Stamp operators on plain tensors; DTensor comes back here with its local ones."""
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented
        start = self.clock.now()
        result = func(*args, **(kwargs or {}))
        end = self.clock.now()
        name = f"{str(func).split('.')[1]}_{len(self._events)}"
        where = (self.strand, self.micro_batch, start, end)
        if func == WAIT:
            issue = self._flying.pop(_pointer(args[0]), None)
            if issue is not None:
                self._events.append(_Event(issue.name, WAIT_KIND, *where, issue=issue))
        elif row := row_of(func):
            lane = self.axis_of_group.get(row.group_in(args), "?")
            size = max(_bytes(args), _bytes(result))
            event = _Event(name, kind_of_collective(func, args), *where, lane=lane, bytes=size)
            self._flying[_pointer(result)] = event
            self._events.append(event)
        else:
            self._events.append(_Event(name, kind_of_target(func), *where))
        return result

    def timeline(self, label: str, rank: int) -> Timeline:
        """What was recorded, from time 0."""
        ns = self.clock.nanoseconds
        origin = min((ns(event.start) for event in self._events), default=0)
        lane_free: dict[str, int] = {}
        spans: list[Span] = []
        for event in self._events:
            start, end = ns(event.start) - origin, ns(event.end) - origin
            common = {"strand": event.strand, "micro_batch": event.micro_batch}
            spans.append(Span(event.name, event.kind, COMPUTE_LANE, start, end, **common))
            if event.issue is None:
                continue
            issue = event.issue
            began, lane = ns(issue.start) - origin, issue.lane
            blocked = end - start > BLOCKED_NS
            done = end if blocked else start
            taken = min(max(began, lane_free.get(lane, 0)), done)
            lane_free[lane] = max(done, lane_free.get(lane, 0))
            where = {"strand": issue.strand, "micro_batch": issue.micro_batch}
            spans.append(
                Span(
                    issue.name,
                    Kind(issue.kind),
                    lane,
                    taken,
                    done,
                    issue_ns=began,
                    bytes=issue.bytes,
                    end_known=blocked,
                    **where,
                )
            )
        return Timeline(label, rank, tuple(spans))


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(value: Any) -> int:
    leaves = tree_leaves(value)
    return sum(t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor))
