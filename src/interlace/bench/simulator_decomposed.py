"""Rows of `simulator` for decomposed collectives: CommFuse's published layer against ours.

The paper (arXiv 2604.24013, table 1) ran a feed-forward of 4 tensor ranks, forward, with the whole
sum behind it, with data slicing, and decomposed. It names no accelerator, so compute and collective
are taken from its run with the whole sum, and the other two are simulated from them, by the graphs
that `interlace simulate` writes. Its attention has no such parts, and is not compared.
"""

from dataclasses import dataclass

from interlace.bench.results import ResultRow
from interlace.ir.graph import Kind
from interlace.sim.lanes import simulate
from interlace.strategy.decomposed_operators import CutCollective, scattered_matmul
from interlace.strategy.timed_graph import TimedGraph

RANKS = 4
WHOLE_MS, EXPOSED_MS = 122.3, 43.8
"""With the whole sum: the layer, and what of it the rank waits for."""
MOST_SLICES = 8
"""Of data slicing, which the paper does not say: the most that MindSpeed offers, whose form that
is."""
HEADER = ("feed-forward of 4 ranks", "published ms", "simulated", "ratio")
_CASE = "decomposed, CommFuse"


@dataclass(frozen=True, kw_only=True)
class DecomposedScore:
    """A way to run the layer."""

    name: str
    published_ms: float
    simulated_ms: float

    @property
    def ratio(self) -> float:
        """Simulated over published."""
        return self.simulated_ms / self.published_ms


def decomposed_scores() -> list[DecomposedScore]:
    """Data slicing, and the ring of CommFuse."""
    compute_s, sum_s = (WHOLE_MS - EXPOSED_MS) / 1e3, EXPOSED_MS / 1e3
    slicing = CutCollective(
        kind=Kind.REDUCE_SCATTER,
        ranks=RANKS,
        pieces=MOST_SLICES,
        ring=False,
        compute_s=compute_s / MOST_SLICES,
        transfer_s=sum_s / MOST_SLICES,
        moved=0.0,
    )
    ring = CutCollective(
        kind=Kind.SEND,
        ranks=RANKS,
        pieces=1,
        ring=True,
        compute_s=compute_s / RANKS,
        transfer_s=sum_s / (RANKS - 1),
        moved=0.0,
    )
    ways = (("data slicing", 83.9, slicing), ("decomposed", 77.1, ring))
    return [
        DecomposedScore(name=name, published_ms=published, simulated_ms=_simulated_ms(cut))
        for name, published, cut in ways
    ]


def decomposed_table(scores: list[DecomposedScore]) -> list[tuple[str, ...]]:
    """Cells of the printed table, in the order of `HEADER`."""
    return [
        (each.name, f"{each.published_ms:.1f}", f"{each.simulated_ms:.1f}", f"{each.ratio:.2f}")
        for each in scores
    ]


def decomposed_rows(scores: list[DecomposedScore]) -> list[ResultRow]:
    """In the form of all benches: ours are simulated, the baseline published."""
    return [
        ResultRow(
            case=_CASE,
            metric=f"{each.name.replace(' ', '_')}_ms",
            ours=each.simulated_ms,
            baseline=each.published_ms,
            ratio=each.ratio,
            spread=None,
        )
        for each in scores
    ]


def _simulated_ms(cut: CutCollective) -> float:
    graph = TimedGraph("feed-forward")
    scattered_matmul(graph, cut, "matmul", "sum", ())
    whole = graph.graph
    return simulate(whole, whole.order, graph.solo_ns).length_ns / 1e6
