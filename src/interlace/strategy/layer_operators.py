"""Operators of layers as graphs with times, from shapes alone: what passes are made of.

A forward has, for each layer, norm, gather, projections, rotation, attention, output matmul, sum,
and the same for the feed-forward; a backward the same from its end, with two matmuls for each. Of a
ZeRO-3 layer the weights are gathered while the layer before runs, as the trainer's graphs do.
Times of the operators of a layer add up to those of `hardware.layer_times`, which are held against
published steps; single ones share them out in proportion to their own formulas.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from interlace.hardware.device_rates import DeviceRates
from interlace.hardware.layer_times import head_passes, layer_passes
from interlace.hardware.operator_times import fused_attention_s, matmul_s
from interlace.hardware.step_job import StepJob
from interlace.ir.actions import Direction, Share
from interlace.ir.graph import COMPUTE_LANE, Kind, Operator, OpGraph
from interlace.strategy.job_links import SHARD, TENSOR, JobLinks

_NORM_SHARE = 0.22
"""Of the time of what is no matmul and no attention, that of each of the two norms with its
residual sum; the rest is turned heads and the activation: a choice in line with the passes of
`hardware.layer_times`."""
_TURNED_SHARE = 0.2


@dataclass
class TimedGraph:
    """Operators that are written one after the other, with their times in seconds."""

    name: str
    operators: list[Operator] = field(default_factory=list)
    solo_ns: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        name: str,
        kind: Kind,
        seconds: float,
        inputs: Sequence[str],
        *,
        lane: str = COMPUTE_LANE,
        moved: float = 0.0,
    ) -> str:
        """Its name. What takes no time is left out: its first input stands for it."""
        inputs = tuple(each for each in inputs if each)
        if seconds <= 0:
            return inputs[0] if inputs else ""
        size = int(moved)
        self.operators.append(
            Operator(name, kind, kind, lane, tuple(dict.fromkeys(inputs)), (), name, size, 0, 0)
        )
        self.solo_ns[name] = max(1, round(seconds * 1e9))
        return name

    @property
    def graph(self) -> OpGraph:
        """Without times."""
        return OpGraph(self.name, tuple(self.operators), (), ())


@dataclass(frozen=True)
class LayerOperators:
    """What writes the graphs of passes through some layers of one job."""

    job: StepJob
    links: JobLinks
    bucket_bytes: float
    """Largest collective of data-parallel ranks."""

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
        wide = job.ffn * (2 if job.gated else 1) // t
        shapes = {
            "projections": (job.hidden // t + 2 * kv_width, job.hidden),
            "output": (job.hidden, job.hidden // t),
            "up": (wide, job.hidden),
            "down": (job.hidden, job.ffn // t),
        }
        forward = {k: matmul_s(device, tokens, *shape) for k, shape in shapes.items()}
        forward["attention"] = self._attention_s(backward=False)
        backward = {"attention'": self._attention_s(backward=True)}
        for name, (columns, depth) in shapes.items():
            backward[f"{name}'"] = matmul_s(device, tokens, depth, columns)
            backward[f"{name} weight"] = matmul_s(device, columns, depth, tokens)
        once = layer_passes(self.links.cluster, device, job)
        found: dict[str, float] = {}
        for total, parts, mark in zip(once, (forward, backward), ("", "'"), strict=True):
            rest = max(0.0, total.compute_s - sum(parts.values()))
            parts |= {
                f"attention norm{mark}": _NORM_SHARE * rest,
                f"ffn norm{mark}": _NORM_SHARE * rest,
                f"turned{mark}": _TURNED_SHARE * rest,
                f"activation{mark}": (1 - 2 * _NORM_SHARE - _TURNED_SHARE) * rest,
            }
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
    def weights_s(self) -> float:
        """Seconds to gather the weights of a layer over shards; 0 where ranks hold them."""
        if not self.links.layout.gathers_each:
            return 0.0
        return self.shared_s(Kind.ALL_GATHER, 2.0 * self.job.layer_parameters / self.job.tensor)

    @cached_property
    def gradients_s(self) -> float:
        """Seconds to reduce those of a layer after each micro-batch; 0 if once a step."""
        if self.links.layout.reduce == "step" or self.links.layout.data_shard == 1:
            return 0.0
        size = 4.0 * self.job.layer_parameters / self.job.tensor
        return self.shared_s(Kind.REDUCE_SCATTER, size)

    def shared_s(self, kind: Kind, full_bytes: float) -> float:
        """Seconds of a collective over shards, in buckets."""
        buckets = max(1, math.ceil(full_bytes / self.bucket_bytes))
        return self.links.seconds(SHARD, kind, full_bytes, buckets)

    def pass_graph(
        self, direction: Direction, share: Share, layers: int, *, head: bool
    ) -> TimedGraph:
        """A pass through so many layers, with the head behind them."""
        graph = TimedGraph(direction)
        if share == Share.WEIGHT:
            for layer in range(layers):
                for name in ("down", "up", "output", "projections"):
                    seconds = self.seconds[f"{name} weight"]
                    graph.add(f"{name} weight {layer}", Kind.MATMUL, seconds, ())
            return graph
        if direction == Direction.FORWARD:
            self._forward(graph, layers, head=head)
        else:
            self._backward(graph, layers, head=head, weights=share != Share.INPUT)
        return graph

    def _forward(self, graph: TimedGraph, layers: int, *, head: bool) -> None:
        last, starts = "", [""]
        for layer in range(layers):
            ready = self._gathered(graph, layer, starts)
            last = self._forward_layer(graph, layer, last, ready, starts)
        if head:
            gather, _ = self.exchange
            whole = graph.add("gather head", Kind.ALL_GATHER, gather, (last,), lane=TENSOR)
            graph.add("head", Kind.MATMUL, self.head_seconds[0], (whole,))

    def _gathered(self, graph: TimedGraph, layer: int, starts: Sequence[str]) -> str:
        """The weights of a layer, asked for when the layer before begins."""
        before = starts[-1]
        size = 2.0 * self.job.layer_parameters / self.job.tensor
        return graph.add(
            f"weights {layer}", Kind.ALL_GATHER, self.weights_s, (before,), lane=SHARD, moved=size
        )

    def _forward_layer(
        self, graph: TimedGraph, layer: int, last: str, ready: str, starts: list[str],
        *, again: bool = False,
    ) -> str:  # fmt: skip
        """Its result; `again` in a backward, where sums over ranks are kept."""
        s, (gather, scatter) = self.seconds, self.exchange
        mark = f"again {layer}" if again else f"{layer}"
        size = 2.0 * self.job.tokens * self.job.hidden
        for block, first, middle, down in (
            ("attention", "projections", ("turned", "attention"), "output"),
            ("ffn", "up", ("activation",), "down"),
        ):
            last = graph.add(
                f"{block} norm {mark}", Kind.ELEMENTWISE, s[f"{block} norm"], (last, ready)
            )
            if block == "attention":
                starts.append(last)
            last = graph.add(
                f"gather {block} {mark}", Kind.ALL_GATHER, gather, (last,), lane=TENSOR, moved=size
            )
            last = graph.add(f"{first} {mark}", Kind.MATMUL, s[first], (last,))
            for name in middle:
                kind = Kind.ATTENTION if name == "attention" else Kind.ELEMENTWISE
                last = graph.add(f"{name} {mark}", kind, s[name], (last,))
            last = graph.add(f"{down} {mark}", Kind.MATMUL, s[down], (last,))
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
                ready = ""
            last = self._backward_layer(graph, layer, last, ready, starts, weights=weights)

    def _backward_layer(
        self, graph: TimedGraph, layer: int, last: str, ready: str, starts: list[str],
        *, weights: bool,
    ) -> str:  # fmt: skip
        s, (gather, scatter) = self.seconds, self.exchange
        size = 2.0 * self.job.tokens * self.job.hidden
        sums: list[str] = []

        def matmul(name: str, *sources: str) -> str:
            return graph.add(f"{name}' {layer}", Kind.MATMUL, s[f"{name}'"], sources)

        def slope(name: str, source: str) -> None:
            if weights:
                seconds = s[f"{name} weight"]
                sums.append(graph.add(f"{name} weight {layer}", Kind.MATMUL, seconds, (source,)))

        for block, first, middle, down in (
            ("ffn", "up", ("activation",), "down"),
            ("attention", "projections", ("attention", "turned"), "output"),
        ):
            last = graph.add(
                f"gather {block}' {layer}", Kind.ALL_GATHER, gather, (last,), lane=TENSOR,
                moved=size,
            )  # fmt: skip
            source = last
            if block == "attention" and self.links.layout.recompute == "attention":
                last = graph.add(
                    f"attention again {layer}", Kind.ATTENTION, s["attention"], (last,)
                )
            last = matmul(down, last, ready)
            if block == "ffn" and self.links.layout.recompute != "layer":
                starts.append(last)
            slope(down, source)
            for name in middle:
                kind = Kind.ATTENTION if name == "attention" else Kind.ELEMENTWISE
                last = graph.add(f"{name}' {layer}", kind, s[f"{name}'"], (last,))
            source = last
            last = matmul(first, last)
            last = graph.add(
                f"sum {block}' {layer}", Kind.REDUCE_SCATTER, scatter, (last,), lane=TENSOR,
                moved=size,
            )  # fmt: skip
            slope(first, source)
            last = graph.add(
                f"{block} norm' {layer}", Kind.ELEMENTWISE, s[f"{block} norm'"], (last,)
            )
        reduced = 4.0 * self.job.layer_parameters / self.job.tensor
        graph.add(
            f"gradients {layer}", Kind.REDUCE_SCATTER, self.gradients_s, sums, lane=SHARD,
            moved=reduced,
        )  # fmt: skip
        return last

    def _attention_s(self, *, backward: bool) -> float:
        job = self.job
        return fused_attention_s(
            self.device,
            batch=job.micro_batch,
            heads=max(1, job.heads // job.tensor),
            sequence=job.sequence,
            head_size=job.head_size,
            backward=backward,
            kernel="flash2",
        )
