"""OpGraph: one rank's traced computation as data, without torch.

An operator is one kernel-level node of a traced graph or one collective. Views, tuple look-ups
and waits are not operators: they cost nothing to plan, so a dependency through them is a
dependency on the operator behind them. Operators are listed in an order that respects
dependencies (checked), which is also the order of plain sequential execution.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache, wraps
from typing import TypeVar

from interlace.errors import InputError

COMPUTE_LANE = "compute"
"""Name of the lane on which everything but communication runs."""


class Kind(StrEnum):
    """What an operator does; collectives are those with a process group."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    MEMORY = "memory"
    EMBEDDING = "embedding"
    ACCUMULATE = "accumulate"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    OTHER = "other"


COLLECTIVES = frozenset(
    {
        Kind.ALL_GATHER,
        Kind.REDUCE_SCATTER,
        Kind.ALL_REDUCE,
        Kind.ALL_TO_ALL,
        Kind.BROADCAST,
        Kind.SEND,
    }
)
"""Kinds of operators that communicate."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One kernel or collective of a rank's graph."""

    id: str
    """Name, unique in its graph; the node's name in the traced graph."""
    kind: Kind
    target: str
    """The operator called, such as `aten.mm.default`."""
    lane: str
    """`compute`, or the mesh axis whose links a collective uses."""
    inputs: tuple[str, ...]
    """Operators that must have been issued before (for collectives: have finished)."""
    reads: tuple[str, ...]
    """Graph inputs that it reads, through any views."""
    key: str
    """What its solo time depends on: target, shapes, dtypes. Equal keys, equal cost."""
    bytes_in: int
    bytes_out: int
    """Bytes of the storage that it allocates."""
    flops: int
    writes: tuple[str, ...] = ()
    """Graph inputs that it changes in place, such as a gradient sum."""

    @property
    def is_collective(self) -> bool:
        """Whether it runs on a link rather than on the compute lane."""
        return self.kind in COLLECTIVES


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A value that a graph is given: a parameter, a batch, something saved by the forward."""

    id: str
    role: str
    """`parameter`, `buffer`, `batch`, `saved`, `tangent`, `gradient`, `shard`, `shard_gradient` or
    `mesh`."""
    bytes: int


@dataclass(frozen=True)
class OpGraph:
    """The operators of one strand of one rank, in a valid sequential order."""

    name: str
    operators: tuple[Operator, ...]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[str, ...]
    """Operators whose results live on after the graph (loss, values saved for backward)."""

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for op in self.operators:
            missing = [name for name in op.inputs if name not in seen]
            if missing:
                raise InputError(
                    f"graph {self.name!r}: operator {op.id!r} comes before its input "
                    f"{missing[0]!r}",
                    hint="list operators so that every input is defined before it is used",
                )
            if op.id in seen:
                raise InputError(
                    f"graph {self.name!r}: two operators are named {op.id!r}",
                    hint="give every operator of a graph its own name",
                )
            seen.add(op.id)

    @cached_property
    def by_id(self) -> dict[str, Operator]:
        """Operators by name."""
        return {op.id: op for op in self.operators}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The sequential order, as names."""
        return tuple(op.id for op in self.operators)

    @cached_property
    def digest(self) -> str:
        """A hash of everything that a plan or a cost table for this graph depends on."""
        # Not dataclasses.asdict, which copies every tuple of names: four times as slow.
        fields = {
            "name": self.name,
            "operators": [_fields(op) for op in self.operators],
            "inputs": [_fields(each) for each in self.inputs],
            "outputs": self.outputs,
        }
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def collectives(self) -> tuple[Operator, ...]:
        """The operators that run on links."""
        return tuple(op for op in self.operators if op.is_collective)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The compute lane, then every link lane in the graph."""
        return (COMPUTE_LANE, *sorted({op.lane for op in self.collectives}))


def _fields(record: Operator | GraphInput) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__slots__}


T = TypeVar("T")
_KEPT = 8
"""Graphs of which something is kept for who asks again; a choice, the phases of two steps."""


class SameGraph:
    """A graph as the key of a cache, equal to itself alone: to compare two of a deep model by what
    they hold takes about as long as to make what is cached."""

    __slots__ = ("graph",)

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameGraph) and other.graph is self.graph

    def __hash__(self) -> int:
        return id(self.graph)


def once_a_graph(make: Callable[[OpGraph], T]) -> Callable[[OpGraph], T]:
    """Keeps what `make` gives for the last graphs. Nobody may change it."""

    @lru_cache(maxsize=_KEPT)
    def kept(same: SameGraph) -> T:
        return make(same.graph)

    @wraps(make)
    def asked(graph: OpGraph) -> T:
        return kept(SameGraph(graph))

    return asked


def merge(name: str, graphs: dict[str, OpGraph]) -> OpGraph:
    """One graph of several strands; ids become `strand.id`, inputs stay per strand."""
    operators: list[Operator] = []
    inputs: list[GraphInput] = []
    outputs: list[str] = []
    for strand, graph in graphs.items():
        prefix = f"{strand}."
        operators += [_prefixed(op, prefix) for op in graph.operators]
        inputs += [GraphInput(prefix + i.id, i.role, i.bytes) for i in graph.inputs]
        outputs += [prefix + i for i in graph.outputs]
    return OpGraph(name, tuple(operators), tuple(inputs), tuple(outputs))


def _prefixed(op: Operator, prefix: str) -> Operator:
    # Not dataclasses.replace, which goes through every field by name: three times as slow.
    return Operator(
        prefix + op.id,
        op.kind,
        op.target,
        op.lane,
        tuple([prefix + name for name in op.inputs]),
        tuple([prefix + name for name in op.reads]),
        op.key,
        op.bytes_in,
        op.bytes_out,
        op.flops,
        tuple([prefix + name for name in op.writes]),
    )
