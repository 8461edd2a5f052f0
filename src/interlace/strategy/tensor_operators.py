"""Exchanges of tensor ranks as operators, whole or decomposed, with the matmuls next to them.

A layer gathers what lies split along the sequence in front of projections and feed-forward, and
sums and scatters behind them; its backward the other way round. Of a layer with experts those of
the feed-forward stay whole, as what is gathered goes to a router, and so does that of the head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from interlace.hardware.operator_times import matmul_s, moved_s
from interlace.hardware.step_job import StepJob
from interlace.ir.graph import Kind
from interlace.strategy.decomposed_operators import (
    CutCollective,
    chosen,
    gathered_matmul,
    scattered_matmul,
    ways_of,
    whole_of,
)
from interlace.strategy.job_links import TENSOR, JobLinks
from interlace.strategy.timed_graph import TimedGraph

_FED = ("projections", "up")
"""Matmuls whose input is gathered; what the others make is summed."""


@dataclass(frozen=True)
class TensorOperators:
    """Those of a layer."""

    job: StepJob
    links: JobLinks
    seconds: Mapping[str, float]
    """Of matmuls, by name; those of a backward end in `'`."""
    shapes: Mapping[str, tuple[int, int]]
    """(columns, depth) of a forward's matmuls on one rank."""
    user_buffers: bool = False
    """TransformerEngine's way to cut: slices are multiplied on several streams, so that the waves
    of one fill up with those of the next, and arrive in one buffer; the sums of a backward stay
    whole, beside the matmuls for gradients of weights."""

    @cached_property
    def exchange(self) -> tuple[float, float]:
        """Seconds to gather a sequence, and to sum and scatter one."""
        gather = self.links.seconds(TENSOR, Kind.ALL_GATHER, self._bytes)
        return gather, self.links.seconds(TENSOR, Kind.REDUCE_SCATTER, self._bytes)

    @property
    def _bytes(self) -> float:
        return 2.0 * self.job.tokens * self.job.hidden

    @cached_property
    def cuts(self) -> dict[str, CutCollective]:
        """By matmul, how the collective in front of it or behind it is cut; those that stay whole
        are left out."""
        layout = self.links.layout
        if layout.decompose == "off" or self.job.tensor == 1:
            return {}
        found: dict[str, CutCollective] = {}
        for name, (columns, depth) in self.shapes.items():
            for mark, shape in (("", (columns, depth)), ("'", (depth, columns))):
                gathers, matmul = (name in _FED) == (mark == ""), f"{name}{mark}"
                if self.user_buffers and mark and not gathers:
                    continue
                cuts = [
                    self._cut(matmul, shape, pieces, gathers=gathers)
                    for pieces in ways_of(layout.decompose, layout.pieces)
                ]
                plain = self.seconds[matmul] + self.exchange[0 if gathers else 1]
                cut = chosen(cuts, plain, must=layout.decompose != "auto")
                if cut is not None:
                    found[matmul] = cut
        return found

    def _cut(
        self, name: str, shape: tuple[int, int], pieces: int, *, gathers: bool
    ) -> CutCollective:
        layout, job, device = self.links.layout, self.job, self.links.cluster.device
        slicing = layout.decompose == "slicing"
        slices = pieces if slicing else pieces * job.tensor
        size = self._bytes / slices
        kind = Kind.ALL_GATHER if gathers else Kind.REDUCE_SCATTER
        kind = kind if slicing else Kind.SEND
        one = matmul_s(device, math.ceil(job.tokens / slices), *shape)
        share = one / matmul_s(device, job.tokens, *shape)
        if self.user_buffers:
            share = 1 / slices
        return CutCollective(
            kind=kind,
            ranks=job.tensor,
            pieces=pieces,
            ring=layout.decompose not in ("direct", "slicing"),
            compute_s=self.seconds[name] * share,
            transfer_s=self.links.seconds(TENSOR, kind, size),
            moved=size,
            add_s=0.0 if slicing else moved_s(device, 3 * size),
            copy_s=0.0
            if slicing or self.user_buffers
            else moved_s(device, 2 * self._bytes, job.tensor),
        )

    def gather_into(
        self, graph: TimedGraph, block: str, name: str, mark: str, last: str, *more: str,
        whole: bool = False,
    ) -> tuple[str, str]:  # fmt: skip
        """(What was gathered along the sequence, the matmul `name` of it, which reads `more` too);
        `whole` where somebody else reads it in one piece."""
        gather, matmul = f"gather {block} {mark}", f"{name} {mark}"
        if cut := self.cuts.get(name):
            arrived, product = gathered_matmul(graph, cut, gather, matmul, last, more)
            return whole_of(graph, cut, gather, arrived) if whole else arrived, product
        source = self.gather(graph, gather, last)
        return source, graph.add(matmul, Kind.MATMUL, self.seconds[name], (source, *more))

    def gather(self, graph: TimedGraph, name: str, last: str) -> str:
        """What lies split along the sequence, gathered."""
        return graph.add(
            name, Kind.ALL_GATHER, self.exchange[0], (last,), lane=TENSOR, moved=self._bytes
        )

    def sum(self, graph: TimedGraph, name: str, last: str) -> str:
        """What was computed, summed and scattered along the sequence."""
        return graph.add(
            name, Kind.REDUCE_SCATTER, self.exchange[1], (last,), lane=TENSOR, moved=self._bytes
        )

    def sum_of(self, graph: TimedGraph, name: str, mark: str, total: str, *sources: str) -> str:
        """The same of a matmul."""
        matmul = f"{name} {mark}"
        if cut := self.cuts.get(name):
            return scattered_matmul(graph, cut, matmul, total, sources)
        done = graph.add(matmul, Kind.MATMUL, self.seconds[name], sources)
        return self.sum(graph, total, done)
