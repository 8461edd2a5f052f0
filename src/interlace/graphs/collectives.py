"""Traced functional collectives become plain asynchronous c10d calls.

A traced collective is a node `all_gather_into_tensor(x, size, group)` with a `wait_tensor` behind
it. Executable graphs call the functions of this file instead: they return the work object, so that
a recorder can learn when the transfer really ended, and the waiting is a node of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx

from interlace.graphs.gloo_messages import Messages, exchange
from interlace.graphs.torch_private import process_group
from interlace.ir.graph import Kind

_functional = torch.ops._c10d_functional
WAIT = _functional.wait_tensor.default

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


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


def _on_gloo(x: Tensor, group: dist.ProcessGroup) -> bool:
    # get_backend says "undefined" for a group that was made without naming one.
    return f"{x.device.type}:gloo" in dist.get_backend_config(group).split(",")


def wait(pending: Pending) -> Tensor:
    """Block until the collective is done (CPU), or make the stream wait for it (CUDA)."""
    pending.work.wait()
    return pending.output.clone() if pending.part_of_buffer else pending.output


def all_gather(x: Tensor, group_size: int, group_name: str) -> Pending:
    """[n, ...] per rank -> [group_size * n, ...]."""
    output = x.new_empty((x.shape[0] * group_size, *x.shape[1:]))
    group, x = process_group(group_name), x.contiguous()
    if _on_gloo(x, group):
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
    if _on_gloo(x, group):
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
    if _on_gloo(x, group):
        messages = exchange(output, output_splits, x.split(input_splits), group)
        return Pending(output, messages, group_name, x)
    work = dist.all_to_all_single(
        output, x, output_splits, input_splits, group=group, async_op=True
    )
    return Pending(output, _started(work), group_name, x)


def _writable(x: Tensor, *, consume: bool) -> Tensor:
    return x.contiguous() if consume else x.clone(memory_format=torch.contiguous_format)


CONSUMERS = (reduce_scatter, all_reduce)
"""Calls that can work in the buffer of an input that nobody else reads."""

ISSUE = {
    _functional.all_gather_into_tensor.default: (all_gather, Kind.ALL_GATHER),
    _functional.reduce_scatter_tensor.default: (reduce_scatter, Kind.REDUCE_SCATTER),
    _functional.all_reduce.default: (all_reduce, Kind.ALL_REDUCE),
    _functional.all_to_all_single.default: (all_to_all, Kind.ALL_TO_ALL),
}
"""Every collective that can be in a graph: the traced operator, the call that starts it, its kind.
Whatever needs one of these looks here when it needs it."""


def call_of(kind: Kind) -> Callable[..., Pending]:
    """The call that makes a collective of this kind."""
    wanted = Kind.ALL_TO_ALL if kind is Kind.SEND else kind
    return next(call for call, made in ISSUE.values() if made is wanted)


def is_call(target: Any) -> bool:
    """Whether a node of an executable graph with this target starts a collective."""
    return any(target is call for call, _ in ISSUE.values())


def kind_of_collective(target: Any, args: Sequence[Any]) -> Kind:
    """What a collective of `ISSUE` does. An all-to-all in which each rank reaches one rank only is
    a send, whose bytes all cross the link."""
    kind = ISSUE[target][1]
    if kind is Kind.ALL_TO_ALL and sum(split > 0 for split in args[2]) == 1:
        return Kind.SEND
    return kind


def is_collective(node: fx.Node) -> bool:
    """Whether a node of a traced graph starts a collective."""
    return (
        node.op == "call_function"
        and getattr(node.target, "namespace", "") == "_c10d_functional"
        and node.target != WAIT
    )


def is_wait(node: fx.Node) -> bool:
    """Whether a node of a traced graph waits for a collective."""
    return node.op == "call_function" and node.target == WAIT


def group_of(node: fx.Node) -> str:
    """Name of the process group of a collective node; it is the last argument."""
    return str(node.args[-1])
