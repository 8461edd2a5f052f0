"""Operator graphs shaped like a Llama model with tensor and sequence parallelism. No torch.

Per layer and direction four collectives, as a rank of a traced model has them; times follow from
the bytes and flops of one rank.
"""

from collections.abc import Iterable, Mapping

from interlace.ir.graph import COMPUTE_LANE, GraphInput, Kind, Operator, OpGraph, merge
from interlace.search.problem import Problem

ISSUE_NS = 5_000
FLOPS_PER_NS = 60
BYTES_PER_NS = 10


class _Strand:
    """A graph under construction; every method gives the name of what it added."""

    def __init__(self, name: str, tokens: int, width: int, ranks: int) -> None:
        self.name = name
        self.tokens, self.width, self.ranks = tokens, width, ranks
        self.operators: list[Operator] = []
        self.inputs: list[GraphInput] = []
        self.outputs: list[str] = []

    def add(
        self,
        kind: Kind,
        inputs: Iterable[str],
        size: int,
        *,
        flops: int = 0,
        lane: str = COMPUTE_LANE,
        reads: Iterable[str] = (),
    ) -> str:
        name = f"{kind.value}_{len(self.operators)}"
        key = f"{kind} {size} {flops}"
        own = (name, kind, kind.value, lane, tuple(inputs), tuple(reads), key, size, size, flops)
        self.operators.append(Operator(*own))
        return name

    def small(self, *inputs: str, count: int = 1, reads: Iterable[str] = ()) -> str:
        """Elementwise operators in a row on a shard of the residual stream."""
        size = 4 * self.tokens * self.width // self.ranks
        name = self.add(Kind.ELEMENTWISE, inputs, size, reads=reads)
        for _ in range(count - 1):
            name = self.add(Kind.ELEMENTWISE, (name,), size)
        return name

    def gather(self, source: str) -> str:
        return self.add(Kind.ALL_GATHER, (source,), 4 * self.tokens * self.width, lane="tp")

    def scatter(self, source: str) -> str:
        size = 4 * self.tokens * self.width
        return self.add(Kind.REDUCE_SCATTER, (source,), size // self.ranks, lane="tp")

    def matmul(self, *inputs: str, wide: float = 1.0, gradient: bool = False) -> str:
        """By a weight of width times `wide` times width; `gradient`: adds to a buffer."""
        flops = int(2 * wide * self.tokens * self.width**2 / self.ranks)
        size = 0 if gradient else 4 * self.tokens * self.width // self.ranks
        return self.add(Kind.MATMUL, inputs, size, flops=flops)

    def save(self, name: str) -> None:
        self.outputs.append(name)

    def saved(self, index: int) -> str:
        size = 4 * self.tokens * self.width // self.ranks
        self.inputs.append(GraphInput(f"saved_{index}", "saved", size))
        return f"saved_{index}"

    def graph(self) -> OpGraph:
        return OpGraph(self.name, tuple(self.operators), tuple(self.inputs), tuple(self.outputs))


def forward_graph(layers: int, *, tokens: int = 256, width: int = 1024, ranks: int = 2) -> OpGraph:
    """Attention and feed-forward, `layers` times."""
    strand = _Strand("forward", tokens, width, ranks)
    stream = strand.small()
    for _ in range(layers):
        gathered = strand.gather(strand.small(stream, count=6))
        query, key, value = (strand.matmul(gathered, wide=w) for w in (1, 0.5, 0.5))
        turned = [strand.small(part, count=6) for part in (query, key)]
        attended = strand.add(
            Kind.ATTENTION, (*turned, value), 4 * tokens * width // ranks, flops=tokens**2 * width
        )
        stream = strand.small(stream, strand.scatter(strand.matmul(attended)))
        gathered = strand.gather(strand.small(stream, count=6))
        gate, up = (strand.matmul(gathered, wide=2.75) for _ in range(2))
        inner = strand.small(up, strand.small(gate))
        stream = strand.small(stream, strand.scatter(strand.matmul(inner, wide=2.75)))
        for name in (query, key, value, attended, gate, up, stream):
            strand.save(name)
    return strand.graph()


def backward_graph(layers: int, *, tokens: int = 256, width: int = 1024, ranks: int = 2) -> OpGraph:
    """Input and weight gradients of the same layers."""
    strand = _Strand("backward", tokens, width, ranks)
    stream = strand.small()
    for layer in range(layers):
        saved = [strand.saved(7 * layer + k) for k in range(7)]
        gathered = strand.gather(stream)
        strand.matmul(gathered, wide=2.75, gradient=True)
        inner = strand.matmul(gathered, wide=2.75)
        gate, up = (strand.small(inner, reads=saved[k : k + 1]) for k in (4, 5))
        stream = strand.small(stream, _input_gradient(strand, {gate: 2.75, up: 2.75}))
        gathered = strand.gather(stream)
        strand.matmul(gathered, gradient=True)
        attended = strand.matmul(gathered)
        back = strand.add(
            Kind.ATTENTION,
            (attended,),
            4 * tokens * width // ranks,
            flops=2 * tokens**2 * width,
            reads=saved[:4],
        )
        turned = {strand.small(back, count=6): wide for wide in (1, 0.5)}
        stream = strand.small(stream, _input_gradient(strand, {**turned, back: 0.5}))
    return strand.graph()


def _input_gradient(strand: _Strand, sources: Mapping[str, float]) -> str:
    """Weight gradients, the sum of the input gradients, and the norm's two gradients."""
    for source, wide in sources.items():
        strand.matmul(source, wide=wide, gradient=True)
    parts = [strand.matmul(source, wide=wide) for source, wide in sources.items()]
    scattered = strand.scatter(strand.small(*parts))
    strand.small(scattered, count=3)
    return strand.small(scattered, count=12)


def layers_problem(layers: int, *, ratio: float = 1.0, memory_bytes: int = 0) -> Problem:
    """A pair of strands; all transfers together take `ratio` times as long as all compute."""
    graphs = {"forward": forward_graph(layers), "backward": backward_graph(layers)}
    pair = merge("pair", graphs)
    times = {op.id: _solo_ns(op) for op in pair.operators}
    computed = sum(times[op.id] for op in pair.operators if not op.is_collective)
    transferred = sum(times[op.id] for op in pair.collectives)
    scale = ratio * computed / transferred
    times |= {op.id: int(scale * times[op.id]) for op in pair.collectives}
    return Problem(pair, times, ISSUE_NS, memory_bytes)


def _solo_ns(op: Operator) -> int:
    moved = (op.bytes_in + op.bytes_out) / BYTES_PER_NS
    return ISSUE_NS + int(max(op.flops / FLOPS_PER_NS, moved))
