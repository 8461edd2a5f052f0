"""Collectives of tensor ranks cut into steps under a part of the matmul next to them, as operators.

    ring, direct, bidirectional   a slice of each rank: a gather multiplies its own first and the
                                  others as they arrive, a scatter computes its own last, so that
                                  neither a head nor a tail is exposed (CommFuse, arXiv 2604.24013)
    slicing                       so many smaller collectives, each under the matmul of another

A slice's matmul has the time of its own shape, which leaves more of the multiprocessors idle than
the whole one. Of a ring a rank passes on what it got, so it waits for that; straight sends are all
asked for at once. Both directions of a ring leave by one link here, as behind a switch. Weight
gradients read all that was gathered, which is copied together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.ir.graph import Kind
from interlace.sim.decomposed import LEAST_GAIN, PIECES, SLICES
from interlace.strategy.job_links import TENSOR
from interlace.strategy.timed_graph import TimedGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class CutCollective:
    """How one collective and its matmul are cut, and what a slice takes."""

    kind: Kind
    """Of a transfer: a send, or a smaller collective."""
    ranks: int
    pieces: int
    """Of each rank's slice; with `slicing` slices in all."""
    ring: bool
    """Whether a transfer waits for the one before, which it passes on."""
    compute_s: float
    """Matmul of one slice."""
    transfer_s: float
    moved: float
    """Bytes of one transfer."""
    add_s: float = 0.0
    """To add what arrived to a slice."""
    copy_s: float = 0.0
    """To put what was gathered together."""

    @property
    def own(self) -> int:
        """Slices that are on the rank already, or stay on it."""
        return 0 if self.kind is not Kind.SEND else self.pieces

    @property
    def transfers(self) -> int:
        """How many."""
        return self.pieces if self.kind is not Kind.SEND else (self.ranks - 1) * self.pieces

    @property
    def slices(self) -> int:
        """Of the matmul."""
        return self.transfers + self.own

    @property
    def seconds(self) -> float:
        """Of both with nothing beside them."""
        compute, transfer = self.compute_s, self.transfer_s
        rest = max((self.slices - 1) * compute, self.transfers * transfer)
        if self.kind is Kind.SEND:  # `sim.decomposed.decomposed_ns`
            return compute + rest
        return self.pieces * max(compute, transfer) + min(compute, transfer)


def ways_of(variant: str, pieces: int) -> tuple[int, ...]:
    """Numbers of pieces that are tried."""
    if pieces:
        return (pieces,)
    return (SLICES,) if variant == "slicing" else PIECES


def chosen(cuts: Sequence[CutCollective], plain_s: float, *, must: bool) -> CutCollective | None:
    """The fastest; None, the collective stays whole, if no one gains enough and none `must` be."""
    best = min(cuts, key=lambda cut: cut.seconds)
    return best if must or best.seconds <= plain_s * (1 - LEAST_GAIN) else None


def gathered_matmul(
    graph: TimedGraph, cut: CutCollective, gather: str, matmul: str, last: str, more: Sequence[str]
) -> tuple[str, str]:
    """(what stands for all that was gathered, the product); `more` is what the matmul reads too."""
    came: list[str] = []

    def ask(number: int) -> None:
        source = came[number - cut.own] if cut.ring and number >= cut.own else last
        name = f"{gather} {number}"
        came.append(
            graph.add(
                name, cut.kind, cut.transfer_s, (source,), lane=TENSOR, moved=cut.moved
            )
        )  # fmt: skip

    done = ""
    for number in range(0 if cut.ring else cut.transfers):
        ask(number)
    for number in range(cut.slices):
        if cut.ring and number < cut.transfers:
            ask(number)
        arrived = came[number - cut.own] if number >= cut.own else last
        name = f"{matmul} {number}"
        done = graph.add(name, Kind.MATMUL, cut.compute_s, (arrived, done, *more))
    return came[-1], done


def whole_of(graph: TimedGraph, cut: CutCollective, gather: str, arrived: str) -> str:
    """What was gathered, put together."""
    return graph.add(f"{gather} joined", Kind.MEMORY, cut.copy_s, (arrived,))


def scattered_matmul(
    graph: TimedGraph, cut: CutCollective, matmul: str, scatter: str, sources: Sequence[str]
) -> str:
    """The sum of this rank's rows."""
    sent: list[str] = []
    done = ""
    for number in range(cut.slices):
        done = graph.add(f"{matmul} {number}", Kind.MATMUL, cut.compute_s, (*sources, done))
        if cut.ring and number >= cut.own:
            ready = (done, sent[number - cut.own])
            done = graph.add(f"{matmul} {number} added", Kind.ELEMENTWISE, cut.add_s, ready)
        if number < cut.transfers:
            name = f"{scatter} {number}"
            sent.append(
                graph.add(name, cut.kind, cut.transfer_s, (done,), lane=TENSOR, moved=cut.moved)
            )
    if cut.ring:
        return done
    if cut.kind is not Kind.SEND:
        return sent[-1]
    added = cut.add_s * cut.transfers
    return graph.add(f"{scatter} added", Kind.ELEMENTWISE, added, (done, sent[-1]))
