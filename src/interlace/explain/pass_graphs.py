"""The forward and the backward of one micro-batch of a trace, as graphs that the searches and the
simulator take.

Nothing in a trace says which kernel needs which result, so dependencies are read off its order, on
the safe side:

* the kernels of a pass keep their order;
* a collective waits for the last kernel that was launched before it and had ended when it began,
  because NCCL's streams wait for the stream that calls them;
* the first kernel that was launched after a collective and began after its end waits for it.

Time in which the device did nothing although no collective was under way belongs to the kernel
before it: the host, which issues both strands, was not faster.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from interlace.explain.rank_trace import Communicated, Computed, Pass, RankTrace
from interlace.ir import interval_sets as sets
from interlace.ir.graph import COLLECTIVES, COMPUTE_LANE, Kind, Operator, OpGraph

_PIECES = 1000
"""Pieces into which the compute of a pass is merged where nothing depends on a kernel; a choice
that bounds the time of a search."""
_NEAR = 3
"""Kernels from a collective within which the matmul that can hide it is looked for: casts and
copies may stand between."""
_MATMUL = re.compile(
    r"gemm|matmul|(^|[^a-z])(add|b|baddb)?mm|linear|cutlass|nvjet|cublas|xmma|Cijk_|attention"
    r"|flash|fmha|convolution",
    re.IGNORECASE,
)
"""Names of kernels and operators that multiply matrices."""
_DATA_PARALLEL = re.compile(r"dp|data|fsdp|shard|replica|zero|ddp", re.IGNORECASE)
"""Process groups whose collectives move weights and gradients; they are not decomposed."""


@dataclass(frozen=True, slots=True)
class TracedSite:
    """A collective beside a matmul, which decomposition could hide in it."""

    collective: str
    matmul: str
    gathers: bool
    """The matmul reads what the collective gathers; else the collective scatters its result."""
    ranks: int
    exposed_ns: int


@dataclass(frozen=True)
class PassGraph:
    """One pass of one micro-batch."""

    graph: OpGraph
    solo_ns: Mapping[str, int]
    sites: tuple[TracedSite, ...]


def busy_times(trace: RankTrace, step: int) -> dict[int, int]:
    """How long each kernel of `step`, by its index in `trace.computed`, keeps the compute lane: the
    time in which it ran and no earlier kernel did, and the time after it in which the device did
    nothing at all."""
    talk = sets.union((each.start_ns, each.end_ns) for each in trace.communicated)
    own = [i for i, each in enumerate(trace.computed) if each.place.step == step]
    found: dict[int, int] = {}
    gaps: list[sets.Interval] = []
    before: list[int] = []
    reach = trace.computed[own[0]].start_ns if own else 0
    for position, i in enumerate(own):
        each = trace.computed[i]
        if position and each.start_ns > reach:
            gaps.append((reach, each.start_ns))
            before.append(own[position - 1])
        found[i] = max(0, each.end_ns - max(each.start_ns, reach))
        reach = max(reach, each.end_ns)
    for start, end in sets.without(gaps, talk):
        found[before[bisect_right(gaps, (start, 1 << 62)) - 1]] += end - start
    return found


def pass_graph(
    trace: RankTrace, step: int, part: Pass, micro_batch: int, times: Mapping[int, int]
) -> PassGraph:
    """The graph of one pass; `times` are those of `busy_times`."""
    wanted = (step, part, micro_batch)
    chosen = [
        (each, times[i])
        for i, each in enumerate(trace.computed)
        if (each.place.step, each.place.part, each.place.micro_batch) == wanted
    ]
    talk = [
        each
        for each in trace.communicated
        if (each.place.step, each.place.part, each.place.micro_batch) == wanted
    ]
    return _Builder(trace, part, [c for c, _ in chosen], [ns for _, ns in chosen], talk).build()


class _Builder:
    """Joins kernels to pieces and gives collectives their places between them."""

    def __init__(
        self,
        trace: RankTrace,
        part: Pass,
        kernels: Sequence[Computed],
        times: Sequence[int],
        talk: Sequence[Communicated],
    ) -> None:
        self.part, self.kernels, self.times, self.talk = part, kernels, times, talk
        self.busy = sets.union((each.start_ns, each.end_ns) for each in trace.computed)
        self.after = [self._last_before(each) for each in talk]
        """Index of the kernel that each collective waits for, -1 for none."""
        self.users = [self._first_user(each, at) for each, at in zip(talk, self.after, strict=True)]
        """Index of the kernel that waits for each collective; the number of kernels for none."""
        self.joined: dict[int, int] = {}
        """First kernel of a piece that holds a matmul -> its last kernel."""

    def build(self) -> PassGraph:
        sites = self._sites()
        pieces = self._pieces()
        starts = [start for start, _ in pieces]

        def piece(kernel: int) -> str:
            return f"k{bisect_right(starts, kernel) - 1}"

        operators: list[Operator] = []
        solo: dict[str, int] = {}
        waiting: dict[int, list[str]] = {}
        order = sorted(range(len(self.talk)), key=lambda i: (self.after[i], i))
        placed = 0
        for number, (start, end) in enumerate(pieces):
            while placed < len(order) and self.after[order[placed]] < start:
                i = order[placed]
                source = (piece(self.after[i]),) if self.after[i] >= 0 else ()
                operators.append(_collective(f"c{i}", self.talk[i], source))
                solo[f"c{i}"] = self.talk[i].duration_ns
                waiting.setdefault(self.users[i], []).append(f"c{i}")
                placed += 1
            needed = [name for k in range(start, end + 1) for name in waiting.pop(k, ())]
            chain = [f"k{number - 1}"] if number else []
            operators.append(_compute(f"k{number}", (*chain, *needed)))
            solo[f"k{number}"] = sum(self.times[start : end + 1])
        for i in order[placed:]:
            source = (piece(self.after[i]),) if self.after[i] >= 0 else ()
            operators.append(_collective(f"c{i}", self.talk[i], source))
            solo[f"c{i}"] = self.talk[i].duration_ns
        named = tuple(replace(s, matmul=piece(int(s.matmul))) for s in sites)
        graph = OpGraph(str(self.part), tuple(operators), (), ())
        return PassGraph(graph, solo, named)

    def _last_before(self, each: Communicated) -> int:
        """Kernels are in order of their starts, so the search goes back from those begun."""
        for i in range(bisect_right(self.kernels, each.start_ns, key=_start) - 1, -1, -1):
            kernel = self.kernels[i]
            if kernel.launched_ns <= each.launched_ns and kernel.end_ns <= each.start_ns:
                return i
        return -1

    def _first_user(self, each: Communicated, after: int) -> int:
        first = bisect_right(self.kernels, each.end_ns - 1, key=_start)
        for i in range(max(first, after + 1), len(self.kernels)):
            if self.kernels[i].launched_ns >= each.launched_ns:
                return i
        return len(self.kernels)

    def _sites(self) -> list[TracedSite]:
        found: list[TracedSite] = []
        taken: set[int] = set()
        for i, each in enumerate(self.talk):
            gathers = each.kind == Kind.ALL_GATHER
            fits = gathers or each.kind == Kind.REDUCE_SCATTER
            if not fits or each.group_size < 2 or _DATA_PARALLEL.search(each.group):
                continue
            span = (each.start_ns, each.end_ns)
            exposed = sets.length(sets.without([span], self.busy))
            piece = self._beside(self.users[i], 1) if gathers else self._beside(self.after[i], -1)
            if piece is None or not exposed or not taken.isdisjoint(range(piece[0], piece[1] + 1)):
                continue
            taken |= set(range(piece[0], piece[1] + 1))
            self.joined[piece[0]] = piece[1]
            found.append(TracedSite(f"c{i}", str(piece[0]), gathers, each.group_size, exposed))
        return found

    def _beside(self, kernel: int, way: int) -> tuple[int, int] | None:
        """First and last kernel from `kernel` to the matmul nearest to it in one direction."""
        for i in range(kernel, kernel + way * _NEAR, way):
            if not 0 <= i < len(self.kernels):
                return None
            if _MATMUL.search(self.kernels[i].name):
                return (min(kernel, i), max(kernel, i))
        return None

    def _pieces(self) -> list[tuple[int, int]]:
        """Kernels (first, last) that become one operator."""
        longest = sum(self.times) // _PIECES
        begins = {*self.users, *self.joined, *(at + 1 for at in self.after)}
        begins |= {last + 1 for last in self.joined.values()}
        inside = {k for first, last in self.joined.items() for k in range(first + 1, last + 1)}
        pieces: list[tuple[int, int]] = []
        size = 0
        for i, ns in enumerate(self.times):
            new = i in begins and i not in inside
            if pieces and not new and (i in inside or size + ns <= longest):
                pieces[-1] = (pieces[-1][0], i)
                size += ns
            else:
                pieces.append((i, i))
                size = ns
        return pieces


def _start(each: Computed) -> int:
    return each.start_ns


def _compute(name: str, inputs: tuple[str, ...]) -> Operator:
    return Operator(name, Kind.OTHER, name, COMPUTE_LANE, inputs, (), name, 0, 0, 0)


def _collective(name: str, each: Communicated, inputs: tuple[str, ...]) -> Operator:
    """Kinds that Interlace has no word for are sends to it: they use a link and nothing else."""
    known = {str(kind) for kind in COLLECTIVES}
    kind = Kind(each.kind) if each.kind in known else Kind.SEND
    moved = each.bytes or 0
    return Operator(name, kind, each.kind, each.lane, inputs, (), name, moved, moved, 0)
