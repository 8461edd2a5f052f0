"""Traced functional collectives become plain asynchronous c10d calls.

A traced collective is a node `all_gather_into_tensor(x, size, group)` with a `wait_tensor` behind
it. Executable graphs call the functions of this file instead: they return the work object, so that
a recorder can learn when the transfer really ended, and the waiting is a node of its own. What is
known about each operator is a row of one table, or of its own if it is a user's (`declare`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx

from interlace.errors import InputError
from interlace.experts.between_ranks import EXCHANGE
from interlace.graphs.expert_messages import evenly, start_rows
from interlace.graphs.gloo_messages import Messages, exchange
from interlace.graphs.torch_private import OpOverload, process_group
from interlace.ir.graph import COLLECTIVES, Kind

_FUNCTIONAL = "_c10d_functional"
"""Namespace of torch's functional collectives."""
_functional = torch.ops._c10d_functional
WAIT = _functional.wait_tensor.default
"""The operator that ends one."""

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
"""torch.distributed's reductions by the words of the functional collectives."""


class Pending(NamedTuple):
    """A collective in flight; `output` must not be read before `work` is done."""

    output: Tensor
    work: dist.Work | Messages
    group: str = ""
    """Name of its process group, whose collectives run one after the other."""
    source: Tensor | None = None
    """What is sent, if that is not `output`. NCCL's work lets go of it as soon as any stream waits,
    and its memory would be given away while the transfer still reads it."""
    part_of_buffer: bool = False
    """Whether `output` is a slice of a larger buffer that should not outlive the wait."""


def _started(work: dist.Work | None) -> dist.Work:
    return cast("dist.Work", work)  # async_op=True gives a work


def on_gloo(device_type: str, group: dist.ProcessGroup) -> bool:
    """Whether gloo, a library of the host, sends what a group has on devices of this type."""
    # get_backend says "undefined" for a group that was made without naming one.
    return f"{device_type}:gloo" in dist.get_backend_config(group).split(",")


def wait(pending: Pending) -> Tensor:
    """Block until the collective is done (CPU), or make the stream wait for it (CUDA)."""
    pending.work.wait()
    return pending.output.clone() if pending.part_of_buffer else pending.output


def all_gather(x: Tensor, group_size: int, group_name: str) -> Pending:
    """[n, ...] per rank -> [group_size * n, ...]."""
    output = x.new_empty((x.shape[0] * group_size, *x.shape[1:]))
    group, x = process_group(group_name), x.contiguous()
    if on_gloo(x.device.type, group):
        messages = exchange(output, [x.shape[0]] * group_size, [x] * group_size, group)
        return Pending(output, messages, group_name, x)
    # torch 2.13 renamed the call; the old name warns there and the new one is unknown to 2.11.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = call(output, x, group=group, async_op=True)
    return Pending(output, _started(work), group_name, x)


def reduce_scatter(
    x: Tensor, reduce: str, group_size: int, group_name: str, *, consume: bool = False
) -> Pending:
    """[group_size * n, ...] -> this rank's reduced [n, ...].

    gloo itself runs an all-reduce and takes the slice inside `wait()`, in a work object that has
    no future and never reports completion. The same is done here in the open, with the same
    traffic and the same bits, so that the end of the transfer can be observed. `consume` says
    that nobody else reads `x`, which may then be the buffer of that all-reduce.
    """
    group = process_group(group_name)
    rows = x.shape[0] // group_size
    if on_gloo(x.device.type, group):
        buffer = _writable(x, consume=consume)
        work = dist.all_reduce(buffer, op=_REDUCE[reduce], group=group, async_op=True)
        part = buffer.narrow(0, group.rank() * rows, rows)
        return Pending(part, _started(work), group_name, part_of_buffer=True)
    output, x = x.new_empty((rows, *x.shape[1:])), x.contiguous()
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work = call(output, x, op=_REDUCE[reduce], group=group, async_op=True)
    return Pending(output, _started(work), group_name, x)


def all_reduce(x: Tensor, reduce: str, group_name: str, *, consume: bool = False) -> Pending:
    """Same shape, reduced over the group; `x` is left as it is unless `consume` is set."""
    output = _writable(x, consume=consume)
    group = process_group(group_name)
    work = dist.all_reduce(output, op=_REDUCE[reduce], group=group, async_op=True)
    return Pending(output, _started(work), group_name)


def all_to_all(
    x: Tensor, output_splits: list[int], input_splits: list[int], group_name: str
) -> Pending:
    """Rows are cut by `input_splits`; piece i goes to rank i."""
    output = x.new_empty((sum(output_splits), *x.shape[1:]))
    group, x = process_group(group_name), x.contiguous()
    if on_gloo(x.device.type, group):
        messages = exchange(output, output_splits, x.split(input_splits), group)
        return Pending(output, messages, group_name, x)
    work = dist.all_to_all_single(
        output, x, output_splits, input_splits, group=group, async_op=True
    )
    return Pending(output, _started(work), group_name, x)


def exchange_rows(
    rows: Tensor, counts: Tensor, ranks: int, rows_out: int, forth: bool, group_name: str
) -> Pending:
    """Rows to the ranks of their experts, or back (`experts.between_ranks`)."""
    output, messages, source = start_rows(rows, counts, ranks, rows_out, forth, group_name)
    return Pending(output, messages, group_name, source)


def _writable(x: Tensor, *, consume: bool) -> Tensor:
    return x.contiguous() if consume else x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Collective:
    """A row of the table: what is known about an operator that communicates."""

    call: Callable[..., Pending]
    """Starts it, with the arguments of the traced operator."""
    kind: Kind
    """What it does, for its bytes on the wire. Behind an all-gather and an all-reduce, all ranks of
    the group have equal values."""
    group: int
    """Position of the argument that names the process group."""
    consumes: bool = False
    """Whether the call takes `consume=True`, and then works in the buffer of its input."""
    evenly: Callable[..., tuple[Tensor, tuple[Any, ...]]] | None = None
    """Of a collective whose sizes follow from values: operands for a number of rows, alike on all
    ranks. It is measured with these."""

    def group_in(self, args: Sequence[Any]) -> str:
        """The name of the process group, of the operator's arguments."""
        return str(args[self.group])


TABLE: Mapping[Any, Collective] = MappingProxyType(
    {
        _functional.all_gather_into_tensor.default: Collective(all_gather, Kind.ALL_GATHER, 2),
        _functional.reduce_scatter_tensor.default: Collective(
            reduce_scatter, Kind.REDUCE_SCATTER, 3, consumes=True
        ),
        _functional.all_reduce.default: Collective(all_reduce, Kind.ALL_REDUCE, 2, consumes=True),
        _functional.all_to_all_single.default: Collective(all_to_all, Kind.ALL_TO_ALL, 3),
        EXCHANGE: Collective(exchange_rows, Kind.ALL_TO_ALL, 5, evenly=evenly),
    }
)
"""The collectives of torch and of mixture-of-experts layers that can be in a graph, by traced
operator. Other operators carry a row of their own (`declare`); `row_of` finds both."""

_ROW = "_interlace_collective"
"""Attribute of a declared operator that holds its row."""
_GROUP_ARGUMENTS = ("group_name", "group")
"""Arguments of these names and of type `str` hold the name of a process group."""


def declare(
    op: OpOverload, call: Callable[..., Pending], kind: Kind, *, consumes: bool = False
) -> None:
    """Say that `op`, such as `torch.ops.mine.exchange.default`, communicates, and how to start it.

    The row is kept on the operator itself. The operator takes the tensor that is sent first, and
    the name of the process group as `group_name` or `group`; it returns one new tensor, behind
    which a model calls `torch.ops._c10d_functional.wait_tensor`. `call` is given the arguments of
    the traced operator, starts the transfer and returns it. Declaring it again as it is changes
    nothing; InputError for an operator of another form, or one that was declared differently.
    """
    if not isinstance(op, OpOverload):
        raise InputError(
            f"{op!r} is not an operator with its overload",
            hint="give it as in torch.ops.mine.exchange.default",
        )
    schema, wrong = op._schema, ""
    if kind not in COLLECTIVES:
        wrong = f"kind {kind} is not one of {', '.join(sorted(COLLECTIVES))}"
    elif not schema.arguments or str(schema.arguments[0].type) != "Tensor":
        wrong = "its first argument is not the tensor that is sent"
    elif schema.is_mutable or [str(each.type) for each in schema.returns] != ["Tensor"]:
        wrong = "it does not return one new tensor"
    group = _group_argument(op)
    if not wrong and (group is None or schema.arguments[group].has_default_value()):
        wrong = "it has no argument group_name or group of type str, without a default"
    if wrong or group is None:
        raise InputError(f"{op} cannot be declared a collective: {wrong}", hint=f"it is {schema}")
    row = Collective(call, kind, group, consumes)
    if (known := row_of(op)) not in (None, row):
        raise InputError(f"{op} is a collective already: {known}", hint="declare it once")
    if known is None:
        setattr(op, _ROW, row)


def row_of(target: Any) -> Collective | None:
    """What is known about a traced operator that communicates; None for all others."""
    return TABLE.get(target) or getattr(target, _ROW, None)


def known_row(target: Any) -> Collective:
    """The same. Raises InputError for a collective that nothing is known about."""
    row = row_of(target)
    if row is None:
        why, hint = unknown(target)
        raise InputError(why, hint=hint)
    return row


def unknown(target: Any) -> tuple[str, str]:
    """Why a collective without a row is refused, and what to do about it."""
    known = "known: " + ", ".join(sorted(str(each) for each in TABLE))
    if target.namespace == _FUNCTIONAL:
        return f"collective {target} is not supported in a traced graph", known
    return (
        f"operator {target} takes the name of a process group, and how it communicates is unknown",
        f"say it with interlace.graphs.collectives.declare(torch.ops.{target}, ...); {known}",
    )


def kind_of_collective(target: Any, args: Sequence[Any]) -> Kind:
    """What a collective does. An all-to-all of torch in which each rank reaches one rank only is a
    send, whose bytes all cross the link."""
    row = known_row(target)
    if row.call is all_to_all and sum(split > 0 for split in args[2]) == 1:
        return Kind.SEND
    return row.kind


def is_collective(node: fx.Node) -> bool:
    """Whether a node of a traced graph starts a collective: one of torch, one that was declared, or
    an operator that takes a process group, of which nothing more need be known."""
    if node.op != "call_function" or node.target == WAIT:
        return False
    return row_of(node.target) is not None or _group_argument(node.target) is not None


def is_wait(node: fx.Node) -> bool:
    """Whether a node of a traced graph waits for a collective."""
    return node.op == "call_function" and node.target == WAIT


def group_of(node: fx.Node) -> str:
    """Name of the process group of a collective node."""
    return known_row(node.target).group_in(node.args)


def _group_argument(target: Any) -> int | None:
    """Position of the argument that names a process group, of an operator that is no part of aten.
    Every functional collective of torch has one, last if its name is another."""
    namespace = getattr(target, "namespace", "aten")
    if namespace == "aten" or not isinstance(target, OpOverload):
        return None
    arguments = target._schema.arguments
    for position, argument in enumerate(arguments):
        if argument.name in _GROUP_ARGUMENTS and str(argument.type) in ("str", "Optional[str]"):
            return position
    return len(arguments) - 1 if namespace == _FUNCTIONAL else None
