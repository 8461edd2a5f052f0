"""Operators and collectives of a traced chunk with the real inputs that they had in one step."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from interlace.graphs.buffers import written
from interlace.graphs.collectives import TABLE, Collective, Pending
from interlace.graphs.torch_private import process_group
from interlace.ir.graph import Kind, Operator
from interlace.runtime.recorder import Recorder


@dataclass(frozen=True)
class ComputeCall:
    """A compute operator that can be run again and again. One that writes to a buffer writes to a
    copy."""

    op: Operator
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self) -> None:
        """Run it; the result is dropped."""
        self.target(*self.args, **self.kwargs)


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that can be started again and again."""

    op: Operator
    x: Tensor
    rest: tuple[Any, ...]
    """Arguments after the tensor: reduce operation, sizes, name of the group."""
    row: Collective
    """How it is started, and which argument is the group."""

    def starts(self, count: int) -> list[Callable[[], Pending]]:
        """`count` starts. Each works on a copy of its own, as collectives may work in place."""
        return [self._start(self.x.clone()) for _ in range(count)]

    def _start(self, x: Tensor) -> Callable[[], Pending]:
        options = {"consume": True} if self.row.consumes else {}
        return lambda: self.row.call(x, *self.rest, **options)

    @property
    def ranks(self) -> int:
        """Size of its group."""
        return process_group(self.row.group_in((self.x, *self.rest))).size()

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole tensor, of which an all-gather is given one rank's part."""
        return self.x.nbytes * (self.ranks if self.op.kind is Kind.ALL_GATHER else 1)

    def resized(self, full_bytes: int) -> "CollectiveCall":
        """The same collective on a tensor of about `full_bytes` in all, made of the same values.

        The size is rounded up to whole rows for each rank. A row is a single number, except for an
        operator of a user's own, which may need rows as long as those that it was given.
        """
        ranks = self.ranks
        if self.row.evenly is not None:
            x, rest = self.row.evenly(self.x, self.rest, -(-full_bytes // self.x[:1].nbytes))
            return replace(self, x=x, rest=rest)
        if self.row not in TABLE.values() and self.x.dim() and self.x.numel():
            row_bytes = self.x[:1].nbytes * ranks
            rows = -(-full_bytes // row_bytes) * (1 if self.op.kind is Kind.ALL_GATHER else ranks)
            copies = -(-rows // len(self.x))
            x = self.x.repeat(copies, *[1] * (self.x.dim() - 1))[:rows].clone()
            return replace(self, x=x)
        rows = -(-full_bytes // (self.x.element_size() * ranks))
        count = rows if self.op.kind is Kind.ALL_GATHER else rows * ranks
        flat = self.x.reshape(-1)
        x = flat.repeat(-(-count // max(flat.numel(), 1)))[:count].clone()
        rest = self.rest
        if self.op.kind is Kind.ALL_TO_ALL:
            rest = ([rows] * ranks, [rows] * ranks, *rest[2:])
        elif self.op.kind is Kind.SEND:
            ways = ([count if split else 0 for split in splits] for splits in rest[:2])
            rest = (*ways, *rest[2:])
        return replace(self, x=x, rest=rest)


@dataclass
class Capture(Recorder):
    """A recorder that also keeps the inputs of the first operator of each key in `wanted`."""

    wanted: Collection[str] = ()
    compute: dict[str, ComputeCall] = field(default_factory=dict)
    collectives: dict[str, CollectiveCall] = field(default_factory=dict)

    def _step(
        self, node: fx.Node, values: dict[fx.Node, Any], root: Any, micro_batch: Mapping[str, int]
    ) -> tuple[Any, Any]:
        graph = self.graphs.get(node.meta.get("strand", ""))
        op = graph.by_id.get(node.meta["name"]) if graph and node.op == "call_function" else None
        if op is not None and op.key in self.wanted:
            self._keep(op, node, values)
        return super()._step(node, values, root, micro_batch)

    def _keep(self, op: Operator, node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        if op.is_collective and op.key not in self.collectives:
            given: Any = fx.node.map_arg(node.args, values.__getitem__)
            x, rest, row = given[0].clone(), tuple(given[1:]), node.meta["collective"]
            if row.evenly is not None:
                nominal = op.bytes_out // (x.shape[1] * x.element_size())  # alike on all ranks
                x, rest = row.evenly(x, rest, nominal)
            self.collectives[op.key] = CollectiveCall(op, x, rest, row)
        elif not op.is_collective and op.key not in self.compute:
            own = {**values, **{source: values[source].clone() for source in written(node)}}
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), own.__getitem__)
            target: Any = node.target
            self.compute[op.key] = ComputeCall(op, target, tuple(args), dict(kwargs))
