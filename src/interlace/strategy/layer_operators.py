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
from dataclasses import dataclass, replace
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
from interlace.strategy.tensor_operators import TensorOperators
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
    user_buffers: bool = False
    """Cut collectives as TransformerEngine does, and not as the trainer (`tensor_operators`)."""

    @property
    def device(self) -> DeviceRates:
        """Rates of the cluster's device."""
        return self.links.cluster.device

    @cached_property
    def dense(self) -> "LayerOperators":
        """Those of the job's layers without experts."""
        return replace(self, job=self.job.dense)

    @cached_property
    def whole(self) -> "LayerOperators":
        """The same without a collective that is decomposed."""
        layout = replace(self.links.layout, decompose="off")
        return replace(self, links=replace(self.links, layout=layout))

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Of each operator of a layer, by name; `backward` ones end in `'`."""
        job, device, shapes = self.job, self.device, self._shapes
        tokens = job.tokens
        forward: dict[str, float] = {}
        backward: dict[str, float] = {}
        if job.experts is not None:
            forward, backward = expert_parts(
                device, job.experts, tokens=tokens, hidden=job.hidden, tensor=job.tensor
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

    @property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        """(columns, depth) of the matmuls of a layer beside its experts, on one rank."""
        job, t = self.job, self.job.tensor
        kv_width = max(job.kv_width // t, job.head_size)
        found = {
            "projections": (job.query_width // t + 2 * kv_width, job.hidden),
            "output": (job.hidden, job.query_width // t),
        }
        if job.experts is None:
            found["up"] = (job.ffn * (2 if job.gated else 1) // t, job.hidden)
            found["down"] = (job.hidden, job.ffn // t)
        return found

    @cached_property
    def tensor(self) -> TensorOperators:
        """What tensor ranks exchange, with the matmuls next to it."""
        return TensorOperators(
            self.job, self.links, self.seconds, self._shapes, user_buffers=self.user_buffers
        )

    @cached_property
    def head_seconds(self) -> tuple[float, float]:
        """Forward and backward of the head and the loss."""
        forward, backward = head_passes(self.links.cluster, self.device, self.job)
        return forward.compute_s, backward.compute_s

    @cached_property
    def context(self) -> ContextTimes | None:
        """What ranks of a sequence exchange; None without others."""
        return context_times(self.job, self.links)

    @cached_property
    def experts(self) -> ExpertTimes | None:
        """What ranks exchange for their experts; None for layers without."""
        names = ("experts up", "experts activation", "experts down")
        computed = sum(self.seconds.get(name, 0.0) for name in names)
        return expert_times(self.job, self.links, computed)

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
            gather, _ = self.tensor.exchange
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
        s, mark = self.seconds, f"again {layer}" if again else f"{layer}"
        for block in ("attention", "ffn"):
            last = graph.add(
                f"{block} norm {mark}", Kind.ELEMENTWISE, s[f"{block} norm"], (last, ready[0])
            )
            if block == "attention":
                starts.append(last)
            total, behind = f"sum {block} {mark}", ""
            if block == "attention":
                _, last = self.tensor.gather_into(graph, block, "projections", mark, last)
                last = graph.add(f"turned {mark}", Kind.ELEMENTWISE, s["turned"], (last,))
                last = attention_there(graph, self.context, s["attention"], mark, last)
                behind = "output"
            elif self.experts is None:
                _, last = self.tensor.gather_into(graph, block, "up", mark, last)
                last = graph.add(f"activation {mark}", Kind.ELEMENTWISE, s["activation"], (last,))
                behind = "down"
            else:
                if self._gathers_tokens:
                    last = self.tensor.gather(graph, f"gather {block} {mark}", last)
                last = experts_there(graph, self.experts, s, mark, (last, ready[1]), again=again)
            if behind and again:  # sums over ranks are kept
                last = graph.add(f"{behind} {mark}", Kind.MATMUL, s[behind], (last,))
            elif behind:
                last = self.tensor.sum_of(graph, behind, mark, total, last)
            elif not again and self._gathers_tokens:
                last = self.tensor.sum(graph, total, last)
        return last

    def _backward(self, graph: TimedGraph, layers: int, *, head: bool, weights: bool) -> None:
        last, starts = "", [""]
        if head:
            _, scatter = self.tensor.exchange
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
        s, mark, recompute = self.seconds, f"{layer}", self.links.layout.recompute
        sums: list[str] = []
        first: list[str] = []

        def slope(name: str, *sources: str) -> None:
            if weights:
                seconds = s[f"{name} weight"]
                sums.append(graph.add(f"{name} weight {layer}", Kind.MATMUL, seconds, sources))

        def gathered_again(name: str, source: str) -> str:
            if not (weights and self.gathers_again):
                return ""
            return self.tensor.gather(graph, f"gather {name} again {layer}", source)

        def gathered(block: str, name: str, *more: str) -> str:
            """The matmul of what is gathered, beside that for the gradient of its weight."""
            begun = len(graph.operators)
            if block == "attention" and recompute == "attention" and not self._rings:
                also = attention_there(
                    graph, self.context, s["attention"], f"again {mark}", last, again=True
                )
                more = (also, *more)
            source, product = self.tensor.gather_into(
                graph, f"{block}'", f"{name}'", mark, last, *more, whole=weights
            )
            slope(name, source)
            first[:] = [o.id for o in graph.operators[begun:] if o.kind is Kind.MATMUL]
            return product

        for block in ("ffn", "attention"):
            late: list[tuple[str, str]] = []
            again, total = "", f"sum {block}' {layer}"
            if block == "ffn" and self.experts is not None:
                if self._gathers_tokens:
                    last = self.tensor.gather(graph, f"gather {block}' {layer}", last)
                begun = len(graph.operators)
                last, late = experts_back(graph, self.experts, s, mark, (last, *ready))
                first = [graph.operators[begun].id]
                if self._gathers_tokens:
                    last = self.tensor.sum(graph, total, last)
            else:
                if block == "ffn":
                    last = gathered(block, "down", ready[0])
                    name, come = "activation'", (last,)
                else:
                    last = gathered(block, "output", ready[0])
                    name = "turned'"
                    come = attention_back(graph, self.context, s["attention'"], mark, last)
                last = graph.add(f"{name} {mark}", Kind.ELEMENTWISE, s[name], come)
                name = "up" if block == "ffn" else "projections"
                again, late = gathered_again(name, last), [(name, last)]
                last = self.tensor.sum_of(graph, f"{name}'", mark, total, last)
            if block == "ffn" and recompute != "layer":
                starts.append(first[0])
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
    def _gathers_tokens(self) -> bool:
        """Whether tokens are gathered in front of a router, and their results summed."""
        return self.job.experts is None or not self.job.experts.sent_once

    @property
    def _rings(self) -> bool:
        """Whether attention goes around a ring, which keeps what it needs and is not computed
        again."""
        return self.job.ring and self.job.context > 1
