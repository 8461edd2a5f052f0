"""Traced graphs of a whole model as those of its chunks, of which a rank runs some.

Every rank cuts the graphs of the whole model, so each knows what all chunks hand to each other:
edges between any two chunks, a weight that several of them read and inputs of any type follow from
the graph. A cut changes no operator and no order within a graph, so bits stay what they are.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from interlace.errors import InputError, nearest
from interlace.graphs.alike import TracedStep
from interlace.graphs.buffers import inside_fills
from interlace.graphs.chunk_parts import Cut, cut_parts
from interlace.graphs.chunk_places import backward_chunks, forward_chunks, weight_half
from interlace.graphs.module_paths import module_path
from interlace.graphs.parts import RESULT, SAVED, GraphPart
from interlace.graphs.ragged import inside_exchanges
from interlace.graphs.trace import Binding
from interlace.ir.actions import Direction, Share, Strand, strand
from interlace.ir.chunk_graphs import chunk_graphs
from interlace.ir.graph import OpGraph
from interlace.parallel.data import DataLayout
from interlace.runtime.handovers import Carried, ChunkRoute, Handovers
from interlace.runtime.stage_gathers import gathered_in_chunks
from interlace.runtime.traced_strands import BACKWARD, FORWARD, Strands

_Halves = tuple[Cut, list[str], dict[str, str]]
"""Backwards in halves: the parts, their labels, and the label of each operator."""


_SLACK = 0.1
"""By how much of a chunk's arithmetic a cut may be off to save bytes between chunks; a choice."""
_EXCHANGES = "between the exchanges of a layer of experts: their rows are known on its stage only"
_SENDS = "inside of a collective that overlap.decompose has cut into sends"
"""Where no chunk begins."""
USERS = "module."
"""How the paths of the user's module begin in a traced graph, which has its loss too."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which rank runs each chunk of a model, and how."""

    rank_of: Sequence[int]
    """By chunk."""
    rank: int = 0
    """This one."""
    halves: bool = False
    """Whether gradients of inputs and of weights are apart."""
    split_at: tuple[str, ...] = ()
    """The sub-modules with which chunks begin, but the first; by default chunks have equal shares
    of the arithmetic."""
    data: DataLayout | None = None
    """How the ranks of a stage share its weights, if they gather them for each pass."""

    @property
    def own(self) -> tuple[int, ...]:
        """The chunks of this rank."""
        return tuple(chunk for chunk, rank in enumerate(self.rank_of) if rank == self.rank)


def one_rank(chunks: int, *, halves: bool = False, split_at: Sequence[str] = ()) -> Placement:
    """All chunks on this rank."""
    return Placement(rank_of=(0,) * chunks, halves=halves, split_at=tuple(split_at))


def in_chunks(strands: Strands, placement: Placement) -> Strands:
    """`strands` as chunks, of which this rank has its own.

    Raises InputError for graphs too small to cut, and where the ends of a step have graphs of their
    own."""
    for name in strands.parts:
        if name not in (FORWARD, BACKWARD) and strand(name).share != Share.ONCE:
            raise InputError(
                f"the graph {name!r} cannot be cut into chunks",
                hint='set overlap.passes to "all", or overlap.decompose to "off"',
            )
    return _chunking(strands, placement).made()


@dataclass(frozen=True)
class ChunkedModel:
    """All chunks of a model, for planners."""

    op_graphs: Mapping[str, OpGraph]
    """By label of their strands."""
    handovers: Handovers


def chunked(strands: Strands, placement: Placement) -> ChunkedModel:
    """The chunks of all ranks. Raises InputError as `in_chunks`."""
    chunking = _chunking(strands, placement)
    _, graphs = chunking.of_chunks(range(len(placement.rank_of)))
    return ChunkedModel(graphs, chunking.handovers())


def cuts(graph: OpGraph, chunks: int, never: Collection[int] = ()) -> list[int]:
    """How many operators, in their order, stand before each cut of `graph` into so many chunks with
    about equal shares of the arithmetic, each of one operator at least. Of the places whose share
    is right within `_SLACK` of a chunk, the one where the fewest bytes cross is taken; none of
    those in `never`.

    Raises InputError if it has fewer operators than that, or all of them belong together."""
    count = len(graph.operators)
    if count < chunks:
        raise InputError(
            f"the graph {graph.name!r} has {count} operators, too few for {chunks} chunks",
            hint="use a schedule with fewer chunks: two_strand and one_strand have one",
        )
    amounts = [op.flops for op in graph.operators]
    if not any(amounts):
        amounts = [1] * count
    done, total = [0, *accumulate(amounts)], sum(amounts)
    crossing = _crossing_bytes(graph)
    found: list[int] = []
    for number in range(1, chunks):
        least, most = (found[-1] if found else 0) + 1, count - (chunks - number)
        able = [at for at in range(least, most + 1) if at not in never]
        if not able:
            raise InputError(
                f"the graph {graph.name!r} can be cut in {number - 1} places, too few for {chunks} "
                "chunks: the exchanges of a layer of experts, and a collective that is cut into "
                "sends, stay together",
                hint="use a schedule with fewer chunks, fewer stages, or more layers",
            )
        off = {at: abs(chunks * done[at] - number * total) / total for at in able}
        bound = max(_SLACK, min(off.values()))
        near = [at for at in off if off[at] <= bound]
        found.append(min(near, key=lambda at: (crossing[at], off[at], -at)))
    return found


def _crossing_bytes(graph: OpGraph) -> list[int]:
    """By number of operators: bytes of their values that later ones read."""
    place = {op.id: index for index, op in enumerate(graph.operators)}
    last = {op.id: place[op.id] for op in graph.operators}
    for op in graph.operators:
        for name in op.inputs:
            last[name] = place[op.id]
    change = [0] * (len(graph.operators) + 2)
    for op in graph.operators:
        change[place[op.id] + 1] += op.bytes_out
        change[last[op.id] + 1] -= op.bytes_out
    return list(accumulate(change))


def ends_at(forward: GraphPart, modules: Sequence[str]) -> list[int]:
    """How many operators stand before the first of each of these sub-modules of the user's module.

    Raises InputError for one that runs nothing, or not behind the one before."""
    paths = [module_path(node).removeprefix(USERS) for node in forward.operators.values()]
    found: list[int] = []
    for module in modules:
        inside = [i for i, path in enumerate(paths) if f"{path}.".startswith(f"{module}.")]
        if not inside:
            raise InputError(
                f"split_at names {module!r}, and no operator of the forward belongs to it",
                hint=nearest(module, sorted({path for path in paths if path})),
            )
        if inside[0] <= (found[-1] if found else 0):
            before = f"{modules[len(found) - 1]!r}" if found else "the start of the model"
            raise InputError(
                f"split_at names {module!r}, whose first operator does not come behind {before}",
                hint="name sub-modules in the order in which the forward runs them, without the "
                "first",
            )
        found.append(inside[0])
    return found


def _chunking(strands: Strands, placement: Placement) -> "_Chunking":
    """The cut, decided on graphs that read whole weights; they are gathered in its chunks."""
    whole = _Chunking(strands, placement)
    if placement.data is None:
        return whole
    chunk_of = {name: dict(own) for name, own in whole.chunk_of.items()}
    return _Chunking(
        gathered_in_chunks(strands, placement.data, chunk_of), placement, (chunk_of, whole)
    )


class _Chunking:
    def __init__(
        self,
        strands: Strands,
        placement: Placement,
        settled: "tuple[Mapping[str, Mapping[str, int]], _Chunking] | None" = None,
    ) -> None:
        """`settled` has the chunk of each operator, by graph and name, and the same cut of graphs
        with whole weights."""
        self.strands = strands
        self.placement = placement
        self.count = len(placement.rank_of)
        self._whole = self if settled is None else settled[1]
        forward, backward = strands.parts[FORWARD], strands.parts[BACKWARD]
        if settled is None:
            chunk_of = forward_chunks(forward, self._ends(forward))
            backward_of = backward_chunks(backward, forward, chunk_of)
        else:
            chunk_of, backward_of = settled[0][FORWARD], settled[0][BACKWARD]
        self.chunk_of = {FORWARD: chunk_of, BACKWARD: backward_of}
        numbers = range(self.count)
        self.forward_labels = [self._strand(Direction.FORWARD, chunk) for chunk in numbers]
        self.backward_labels = self._backward_labels(Share.WHOLE)
        self.label_of = {
            FORWARD: {name: self.forward_labels[chunk] for name, chunk in chunk_of.items()},
            BACKWARD: {
                name: self._strand(Direction.BACKWARD, chunk) for name, chunk in backward_of.items()
            },
        }
        self.halves = self._halves(backward, backward_of) if placement.halves else None
        self.backward = cut_parts(
            backward, self.backward_labels, self.label_of[BACKWARD], _no_home, apart=self._apart
        )
        self.kept = self._kept()
        self.forward = cut_parts(
            forward, self.forward_labels, self.label_of[FORWARD], self._homes, apart=self._apart
        )

    def _ends(self, forward: GraphPart) -> list[int]:
        modules = self.placement.split_at
        whole = dict.fromkeys(inside_fills(forward.operators.values()), _SENDS)
        whole |= dict.fromkeys(inside_exchanges(forward.operators.values()), _EXCHANGES)
        if not modules:
            return cuts(self.strands.op_graphs[FORWARD], self.count, whole)
        if len(modules) != self.count - 1:
            raise InputError(
                f"split_at names {len(modules)} sub-modules, and the schedule has {self.count} "
                "chunks",
                hint=f"name {self.count - 1}: those with which chunks begin, but the first",
            )
        ends = ends_at(forward, modules)
        for module, end in zip(modules, ends, strict=True):
            if end in whole:
                raise InputError(
                    f"split_at names {module!r}, which begins {whole[end]}",
                    hint="begin a chunk with a whole layer",
                )
        return ends

    def made(self) -> Strands:
        """The chunks of this rank."""
        parts, graphs = self.of_chunks(self.placement.own)
        for name in self.strands.parts:
            if name not in (FORWARD, BACKWARD):
                parts[name] = self.strands.parts[name]
                graphs[name] = self.strands.op_graphs[name]
        return replace(
            self.strands,
            parts=parts,
            op_graphs=graphs,
            uncut=self.strands,
            handovers=self.handovers(),
        )

    def of_chunks(self, wanted: Collection[int]) -> tuple[dict[str, GraphPart], dict[str, OpGraph]]:
        """What the strands of these chunks run, and the same for planners, by label."""
        parts: dict[str, GraphPart] = {}
        graphs: dict[str, OpGraph] = {}
        cuts = [(FORWARD, self.forward, self.forward_labels, self.label_of[FORWARD])]
        cuts += [(BACKWARD, self.backward, self.backward_labels, self.label_of[BACKWARD])]
        cuts += [(BACKWARD, *self.halves)] if self.halves is not None else []
        for name, cut, labels, label_of in cuts:
            found = chunk_graphs(self.strands.op_graphs[name], labels, label_of)
            for label in labels:
                if _chunk(label) in wanted:
                    parts[label], graphs[label] = cut.parts[label], found[label]
        return parts, graphs

    def handovers(self) -> Handovers:
        """What chunks hand to each other."""
        routes = self._routes()
        rank_of = self.placement.rank_of
        return Handovers(
            rank=self.placement.rank,
            rank_of=tuple(rank_of),
            edges=tuple(sorted({(min(a, b), max(a, b)) for _, a, b in routes})),
            messages={
                (way, a, b): tuple(values[name] for name in sorted(values))
                for (way, a, b), values in routes.items()
                if rank_of[a] != rank_of[b]
            },
            owners={
                name: max(chunks) for name, chunks in _readers(self.backward, "gradient").items()
            },
            readers=self._whole._parameter_readers(),
            traced=self._traced(),
        )

    def _traced(self) -> TracedStep:
        strands = self.strands
        module = strands.module
        return TracedStep(
            strands.parts[FORWARD],
            strands.parts[BACKWARD],
            {**dict(module.named_parameters()), **dict(module.named_buffers())},
            strands.axes,
        )

    def _parameter_readers(self) -> dict[str, tuple[int, ...]]:
        """A backward that computes a layer again may read weights of the chunk before."""
        found: dict[str, set[int]] = {}
        for cut in (self.forward, self.backward):
            for name, chunks in _readers(cut, "parameter").items():
                found.setdefault(name, set()).update(chunks)
        return {name: tuple(sorted(chunks)) for name, chunks in found.items()}

    def _strand(self, way: Direction, chunk: int, share: Share = Share.WHOLE) -> str:
        return Strand(way, chunk if self.count > 1 else None, share).label

    def _backward_labels(self, *shares: Share) -> list[str]:
        chunks = reversed(range(self.count))
        return [self._strand(Direction.BACKWARD, chunk, share) for chunk in chunks
                for share in shares]  # fmt: skip

    def _halves(self, backward: GraphPart, chunk_of: Mapping[str, int]) -> _Halves:
        """Beside whole backwards, as a schedule may run some of them whole."""
        late = weight_half(backward, chunk_of)
        shares = (Share.INPUT, Share.WEIGHT)
        labels = self._backward_labels(*shares)
        label_of = {
            name: self._strand(Direction.BACKWARD, chunk, shares[name in late])
            for name, chunk in chunk_of.items()
        }
        cut = cut_parts(backward, labels, label_of, _no_home, apart=self._apart)
        return cut, labels, label_of

    def _apart(self, label: str, other: str) -> bool:
        rank_of = self.placement.rank_of
        return rank_of[_chunk(label)] != rank_of[_chunk(other)]

    def _kept(self) -> dict[str, set[int]]:
        """By saved value: the chunks whose backward reads it."""
        found: dict[str, set[int]] = {}
        for label, part in self.backward.parts.items():
            for binding in part.inputs.values():
                if binding.role == SAVED:
                    found.setdefault(binding.target, set()).add(_chunk(label))
        return found

    def _homes(self, name: Binding, maker: str | None) -> list[str]:
        """The forward parts that give an output: for a value that is kept, one on each rank whose
        backwards read it."""
        made_in = None if maker is None else _chunk(maker)
        if name.role != SAVED:
            in_last = made_in is None or name.role == RESULT
            return [self.forward_labels[self.count - 1 if in_last else made_in]]
        rank_of = self.placement.rank_of
        readers: dict[int, list[int]] = {}
        for chunk in sorted(self.kept.get(name.target, ())):
            readers.setdefault(rank_of[chunk], []).append(chunk)
        homes = []
        for rank, chunks in readers.items():
            if made_in is not None and rank_of[made_in] == rank:
                homes.append(made_in)
                continue
            first = 0 if made_in is None else made_in + 1
            able = [c for c, own in enumerate(rank_of) if own == rank and c >= first]
            wanted = [c for c in chunks if c in able] or able
            if not wanted:
                raise InputError(
                    f"the backward of chunk {chunks[0]} reads {name.target!r}, which the forward "
                    f"of chunk {made_in} makes",
                    hint="cut the model at other modules, or into fewer chunks",
                )
            homes.append(min(wanted))
        return [self.forward_labels[chunk] for chunk in homes]

    def _routes(self) -> dict[ChunkRoute, dict[str, Carried]]:
        found: dict[ChunkRoute, dict[str, Carried]] = {}
        for cut in (self.forward, self.backward):
            for label, values in cut.read.items():
                for value in values:
                    source, to = _chunk(value.label), _chunk(label)
                    if source != to:
                        route = strand(label).direction, source, to
                        binding = cut.parts[label].inputs[value.node]
                        found.setdefault(route, {})[binding.target] = Carried(binding, value.node)
        return found


def _no_home(name: Binding, maker: str | None) -> list[str]:
    """A backward that adds to sums has no outputs."""
    raise InputError(f"the backward gives {name.target!r}", hint="accumulate gradients in graphs")


def _chunk(label: str) -> int:
    return strand(label).chunk or 0


def _readers(cut: Cut, role: str) -> dict[str, set[int]]:
    """By parameter: the chunks that have it as an input of this role."""
    found: dict[str, set[int]] = {}
    for label, part in cut.parts.items():
        for binding in part.inputs.values():
            if binding.role == role:
                found.setdefault(binding.target, set()).add(_chunk(label))
    return found
