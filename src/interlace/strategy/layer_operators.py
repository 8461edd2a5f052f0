"""Operators of layers as graphs with times, from shapes alone: what passes are made of.

A forward has, for each layer, norm, gather, projections, rotation, attention, output matmul, sum,
and the same for the feed-forward; a backward the same from its end, with two matmuls for each. Of a
ZeRO-3 layer the weights are gathered while the layer before runs, as the trainer's graphs do. What
ranks of a sequence exchange is in `context_operators`, layers of experts in `expert_operators`.
Times of the operators of a layer add up to those of `hardware.layer_times`, which are held against
published steps; single ones share them out in proportion to their own formulas.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from interlace.hardware.device_rates import DeviceRates
from interlace.hardware.expert_times import expert_parts
from interlace.hardware.layer_times import attention_s, head_passes, layer_passes
from interlace.hardware.operator_times import matmul_s
from interlace.hardware.step_job import StepJob
from interlace.ir.actions import Direction, Share
from interlace.ir.graph import Kind
from interlace.strategy.context_operators import (
    ContextTimes,
    attention_back,
    attention_there,
    context_times,
)
from interlace.strategy.expert_operators import (
    ExpertTimes,
    expert_times,
    experts_back,
    experts_there,
)
from interlace.strategy.job_links import EXPERT_SHARD, SHARD, TENSOR, JobLinks
from interlace.strategy.timed_graph import TimedGraph

_NORM_SHARE = 0.22
"""Of the time of what is no matmul and no attention, that of each of the two norms with its
residual sum; the rest is turned heads and the activation: a choice in line with the passes of
`hardware.layer_times`."""
_TURNED_SHARE = 0.2


@dataclass(frozen=True)
class LayerOperators:
    """What writes the graphs of passes through some layers of one job."""

    job: StepJob
    links: JobLinks
    bucket_bytes: float
    """Largest collective of data-parallel ranks."""
    gathers_again: bool = False
    """Keep of what is gathered along the sequence only a rank's own part, and gather it again in
    the backward, beside the matmul for the gradient of the input (arXiv 2205.05198, 4.2.2)."""

    @property
    def device(self) -> DeviceRates:
        """Rates of the cluster's device."""
        return self.links.cluster.device

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Of each operator of a layer, by name; `backward` ones end in `'`."""
        job, device = self.job, self.device
        t, tokens = job.tensor, job.tokens
        kv_width = max(job.kv_width // t, job.head_size)
        shapes = {
            "projections": (job.query_width // t + 2 * kv_width, job.hidden),
            "output": (job.hidden, job.query_width // t),
        }
        forward: dict[str, float] = {}
        backward: dict[str, float] = {}
        if job.experts is None:
            shapes["up"] = (job.ffn * (2 if job.gated else 1) // t, job.hidden)
            shapes["down"] = (job.hidden, job.ffn // t)
        else:
            forward, backward = expert_parts(
                device, job.experts, tokens=tokens, hidden=job.hidden, tensor=t
            )
        forward |= {k: matmul_s(device, tokens, *shape) for k, shape in shapes.items()}
        forward["attention"] = attention_s(device, job, backward=False)
        backward["attention'"] = attention_s(device, job, backward=True)
        for name, (columns, depth) in shapes.items():
            backward[f"{name}'"] = matmul_s(device, tokens, depth, columns)
            backward[f"{name} weight"] = matmul_s(device, columns, depth, tokens)
        active = job.experts is None or job.experts.shared > 0
        rest_share = 1.0 if active else 2 * _NORM_SHARE + _TURNED_SHARE
        once = layer_passes(self.links.cluster, device, job)
        found: dict[str, float] = {}
        for total, parts, mark in zip(once, (forward, backward), ("", "'"), strict=True):
            rest = max(0.0, total.compute_s - sum(parts.values()))
            rest /= rest_share
            parts |= {
                f"attention norm{mark}": _NORM_SHARE * rest,
                f"ffn norm{mark}": _NORM_SHARE * rest,
                f"turned{mark}": _TURNED_SHARE * rest,
            }
            if active:
                parts[f"activation{mark}"] = (1 - 2 * _NORM_SHARE - _TURNED_SHARE) * rest
            scale = total.compute_s / sum(parts.values())
            found |= {name: scale * seconds for name, seconds in parts.items()}
        return found

    @cached_property
    def head_seconds(self) -> tuple[float, float]:
        """Forward and backward of the head and the loss."""
        forward, backward = head_passes(self.links.cluster, self.device, self.job)
        return forward.compute_s, backward.compute_s

    @cached_property
    def exchange(self) -> tuple[float, float]:
        """Seconds to gather a sequence over tensor ranks, and to sum and scatter one."""
        size = 2.0 * self.job.tokens * self.job.hidden
        gather = self.links.seconds(TENSOR, Kind.ALL_GATHER, size)
        return gather, self.links.seconds(TENSOR, Kind.REDUCE_SCATTER, size)

    @cached_property
    def context(self) -> ContextTimes | None:
        """What ranks of a sequence exchange; None without others."""
        return context_times(self.job, self.links)

    @cached_property
    def experts(self) -> ExpertTimes | None:
        """What ranks exchange for their experts; None for layers without."""
        return expert_times(self.job, self.links)

    @cached_property
    def weights(self) -> tuple[tuple[str, float, float], ...]:
        """(lane, seconds, bytes) to gather the weights of a layer over shards, and those of its
        experts over theirs; none where ranks hold them."""
        layout, job = self.links.layout, self.job
        if not layout.gathers_each:
            return ()
        own = 2.0 * job.shared_parameters / job.tensor
        found = [(SHARD, self.shared_s(Kind.ALL_GATHER, own), own)]
        if layout.expert_shards > 1 and job.experts is not None:
            own = 2.0 * job.expert_parameters / job.tensor
            found.append((EXPERT_SHARD, self.shared_s(Kind.ALL_GATHER, own, EXPERT_SHARD), own))
        return tuple(found)

    @cached_property
    def gradients(self) -> tuple[tuple[str, float, float], ...]:
        """The same to reduce those of a layer after each micro-batch; none if once a step."""
        layout, job = self.links.layout, self.job
        if layout.reduce == "step" or layout.shards == 1:
            return ()
        own = float(job.gradient_bytes) * job.shared_parameters / job.tensor
        found = [(SHARD, self.shared_s(Kind.REDUCE_SCATTER, own), own)]
        if layout.expert_shards > 1 and job.experts is not None:
            own = float(job.gradient_bytes) * job.expert_parameters / job.tensor
            seconds = self.shared_s(Kind.REDUCE_SCATTER, own, EXPERT_SHARD)
            found.append((EXPERT_SHARD, seconds, own))
        return tuple(found)

    def shared_s(self, kind: Kind, full_bytes: float, lane: str = SHARD) -> float:
        """Seconds of a collective over data-parallel ranks, in buckets."""
        buckets = max(1, math.ceil(full_bytes / self.bucket_bytes))
        return self.links.seconds(lane, kind, full_bytes, buckets)

    def pass_graph(
        self, direction: Direction, share: Share, layers: int, *, head: bool
    ) -> TimedGraph:
        """A pass through so many layers, with the head behind them."""
        graph = TimedGraph(direction)
        if share == Share.WEIGHT:
            for layer in range(layers):
                for name in self._slopes:
                    seconds = self.seconds[f"{name} weight"]
                    graph.add(f"{name} weight {layer}", Kind.MATMUL, seconds, ())
            return graph
        if direction == Direction.FORWARD:
            self._forward(graph, layers, head=head)
        else:
            self._backward(graph, layers, head=head, weights=share != Share.INPUT)
        return graph

    @property
    def _slopes(self) -> tuple[str, ...]:
        """Matmuls whose gradients of weights may be computed late, in their order."""
        known = ("shared down", "shared up", "down", "up", "experts down", "experts up")
        found = [name for name in known if f"{name} weight" in self.seconds]
        return (*found, "output", "projections")

    def _forward(self, graph: TimedGraph, layers: int, *, head: bool) -> None:
        last, starts = "", [""]
        for layer in range(layers):
            ready = self._gathered(graph, layer, starts)
            last = self._forward_layer(graph, layer, last, ready, starts)
        if head:
            gather, _ = self.exchange
            whole = graph.add("gather head", Kind.ALL_GATHER, gather, (last,), lane=TENSOR)
            graph.add("head", Kind.MATMUL, self.head_seconds[0], (whole,))

    def _gathered(self, graph: TimedGraph, layer: int, starts: Sequence[str]) -> tuple[str, str]:
        """The weights of a layer, and those of its experts, asked for when the layer before
        begins."""
        before, found = starts[-1], ["", ""]
        for number, (lane, seconds, size) in enumerate(self.weights):
            name = f"weights {layer}" if lane == SHARD else f"weights of experts {layer}"
            found[number] = graph.add(
                name, Kind.ALL_GATHER, seconds, (before,), lane=lane, moved=size
            )
        return found[0], found[1]

    def _forward_layer(
        self, graph: TimedGraph, layer: int, last: str, ready: tuple[str, str], starts: list[str],
        *, again: bool = False,
    ) -> str:  # fmt: skip
        """Its result; `again` in a backward, where sums over ranks are kept."""
        s, (gather, scatter) = self.seconds, self.exchange
        mark = f"again {layer}" if again else f"{layer}"
        size = 2.0 * self.job.tokens * self.job.hidden
        for block in ("attention", "ffn"):
            last = graph.add(
                f"{block} norm {mark}", Kind.ELEMENTWISE, s[f"{block} norm"], (last, ready[0])
            )
            if block == "attention":
                starts.append(last)
            last = graph.add(
                f"gather {block} {mark}", Kind.ALL_GATHER, gather, (last,), lane=TENSOR, moved=size
            )
            if block == "attention":
                last = graph.add(f"projections {mark}", Kind.MATMUL, s["projections"], (last,))
                last = graph.add(f"turned {mark}", Kind.ELEMENTWISE, s["turned"], (last,))
                last = attention_there(graph, self.context, s["attention"], mark, last)
                last = graph.add(f"output {mark}", Kind.MATMUL, s["output"], (last,))
            elif self.experts is None:
                last = graph.add(f"up {mark}", Kind.MATMUL, s["up"], (last,))
                last = graph.add(f"activation {mark}", Kind.ELEMENTWISE, s["activation"], (last,))
                last = graph.add(f"down {mark}", Kind.MATMUL, s["down"], (last,))
            else:
                last = experts_there(graph, self.experts, s, mark, (last, ready[1]), again=again)
            if not again:
                last = graph.add(
                    f"sum {block} {mark}", Kind.REDUCE_SCATTER, scatter, (last,), lane=TENSOR,
                    moved=size,
                )  # fmt: skip
        return last

    def _backward(self, graph: TimedGraph, layers: int, *, head: bool, weights: bool) -> None:
        last, starts = "", [""]
        if head:
            _, scatter = self.exchange
            last = graph.add("head'", Kind.MATMUL, self.head_seconds[1], ())
            last = graph.add("sum head'", Kind.REDUCE_SCATTER, scatter, (last,), lane=TENSOR)
        for layer in reversed(range(layers)):
            ready = self._gathered(graph, layer, starts)
            if self.links.layout.recompute == "layer":
                last = self._forward_layer(graph, layer, last, ready, starts, again=True)
                ready = ("", "")
            last = self._backward_layer(graph, layer, last, ready, starts, weights=weights)

    def _backward_layer(
        self, graph: TimedGraph, layer: int, last: str, ready: tuple[str, str], starts: list[str],
        *, weights: bool,
    ) -> str:  # fmt: skip
        s, (gather, scatter) = self.seconds, self.exchange
        size, recompute = 2.0 * self.job.tokens * self.job.hidden, self.links.layout.recompute
        sums: list[str] = []

        def matmul(name: str, *sources: str) -> str:
            return graph.add(f"{name}' {layer}", Kind.MATMUL, s[f"{name}'"], sources)

        def slope(name: str, *sources: str) -> None:
            if weights:
                seconds = s[f"{name} weight"]
                sums.append(graph.add(f"{name} weight {layer}", Kind.MATMUL, seconds, sources))

        def gathered_again(name: str, source: str) -> str:
            if not (weights and self.gathers_again):
                return ""
            name = f"gather {name} again {layer}"
            return graph.add(name, Kind.ALL_GATHER, gather, (source,), lane=TENSOR, moved=size)

        for block in ("ffn", "attention"):
            source = last = graph.add(
                f"gather {block}' {layer}", Kind.ALL_GATHER, gather, (last,), lane=TENSOR,
                moved=size,
            )  # fmt: skip
            late: list[tuple[str, str]] = []
            first = again = ""
            if block == "ffn" and self.experts is not None:
                begun = len(graph.operators)
                last, late = experts_back(graph, self.experts, s, f"{layer}", (last, *ready))
                first = graph.operators[begun].id
            elif block == "ffn":
                first = last = matmul("down", last, ready[0])
                slope("down", source)
                last = graph.add(
                    f"activation' {layer}", Kind.ELEMENTWISE, s["activation'"], (last,)
                )
                again = gathered_again("up", last)
                late, last = [("up", last)], matmul("up", last)
            else:
                if recompute == "attention" and not self._rings:
                    last = attention_there(
                        graph, self.context, s["attention"], f"again {layer}", last, again=True
                    )
                last = matmul("output", last, ready[0])
                slope("output", source)
                come = attention_back(graph, self.context, s["attention'"], f"{layer}", last)
                last = graph.add(f"turned' {layer}", Kind.ELEMENTWISE, s["turned'"], come)
                again = gathered_again("projections", last)
                late, last = [("projections", last)], matmul("projections", last)
            if block == "ffn" and recompute != "layer":
                starts.append(first)
            last = graph.add(
                f"sum {block}' {layer}", Kind.REDUCE_SCATTER, scatter, (last,), lane=TENSOR,
                moved=size,
            )  # fmt: skip
            for name, given in late:
                slope(name, given, again)
            last = graph.add(
                f"{block} norm' {layer}", Kind.ELEMENTWISE, s[f"{block} norm'"], (last,)
            )
        for lane, seconds, reduced in self.gradients:
            name = f"gradients {layer}" if lane == SHARD else f"gradients of experts {layer}"
            graph.add(name, Kind.REDUCE_SCATTER, seconds, sums, lane=lane, moved=reduced)
        return last

    @property
    def _rings(self) -> bool:
        """Whether attention goes around a ring, which keeps what it needs and is not computed
        again."""
        return self.job.ring and self.job.context > 1
