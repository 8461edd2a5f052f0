"""Every collective of torch.distributed as a function of rank, input and group.

Each returns what it left in its outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def outputs(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.full(shape, -1.0) for shape in shapes]


def all_reduce(_rank: int, x: Any, group: Any, op: Any = None) -> list[Any]:
    out = x.clone()
    dist.all_reduce(out, op=op or dist.ReduceOp.SUM, group=group)
    return [out]


def all_reduce_integers(rank: int, _x: Any, group: Any) -> list[Any]:
    out = torch.arange(8, dtype=torch.int64) * (rank + 1)
    work = dist.all_reduce(out, group=group, async_op=True)
    value = work.get_future().wait()
    work.wait()  # gloo completes the future a moment before the work
    assert work.is_completed()
    assert torch.equal(value[0], out)
    return [out]


def all_gather(_rank: int, x: Any, group: Any) -> list[Any]:
    out = outputs((6, 4), (6, 4))
    dist.all_gather(out, x, group=group)
    return out


def all_gather_single(_rank: int, x: Any, group: Any) -> list[Any]:
    (out,) = outputs((12, 4))
    call = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    call(out, x, group=group)
    return [out]


def reduce_scatter_single(_rank: int, x: Any, group: Any) -> list[Any]:
    (out,) = outputs((3, 4))
    call = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    call(out, x, group=group)
    return [out]


def reduce_scatter(_rank: int, x: Any, group: Any) -> list[Any]:
    (out,) = outputs((3, 4))
    dist.reduce_scatter(out, list(x.clone().chunk(2)), group=group)
    return [out]


def all_to_all_even(_rank: int, x: Any, group: Any) -> list[Any]:
    (out,) = outputs((6, 4))
    dist.all_to_all_single(out, x, group=group)
    return [out]


def all_to_all_uneven(rank: int, x: Any, group: Any) -> list[Any]:
    sent = [[1, 5], [4, 2]]
    received = [sent[0][rank], sent[1][rank]]
    (out,) = outputs((sum(received), 4))
    dist.all_to_all_single(out, x, received, sent[rank], group=group)
    return [out]


def broadcast(_rank: int, x: Any, group: Any) -> list[Any]:
    out = x.clone()
    dist.broadcast(out, src=1, group=group)
    return [out]


def reduce(rank: int, x: Any, group: Any) -> list[Any]:
    out = x.clone()
    dist.reduce(out, dst=1, group=group)
    return [out] if rank == 1 else []  # undefined elsewhere


def gather(rank: int, x: Any, group: Any) -> list[Any]:
    out = outputs((6, 4), (6, 4)) if rank == 0 else None
    dist.gather(x, out, dst=0, group=group)
    return out or []


def scatter(rank: int, x: Any, group: Any) -> list[Any]:
    (out,) = outputs((3, 4))
    dist.scatter(out, list(x.clone().chunk(2)) if rank == 1 else None, src=1, group=group)
    return [out]


def objects(rank: int, _x: Any, group: Any) -> list[Any]:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    assert gathered == [{"rank": 0}, {"rank": 1}]
    dist.barrier(group=group)
    return []


def send_and_receive(rank: int, x: Any, group: Any) -> list[Any]:
    (out,) = outputs((6, 4))
    if rank == 0:
        dist.send(x, 1, group=group, tag=3)
        dist.recv(out, 1, group=group, tag=4)
    else:
        assert dist.recv(out, group=group, tag=3) == 0  # from whoever sends
        dist.send(x, 0, group=group, tag=4)
    return [out]


def exchange(rank: int, x: Any, group: Any) -> list[Any]:
    (out,) = outputs((6, 4))
    peer = 1 - rank
    ops = [
        dist.P2POp(dist.irecv, out, peer, group=group),
        dist.P2POp(dist.isend, x, peer, group=group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
        assert work.is_completed()
    return [out]


def coalesced(_rank: int, x: Any, group: Any) -> list[Any]:
    ops, name = torch.ops._c10d_functional, group.group_name
    started = [
        *ops.all_reduce_coalesced([x, x * 2], "sum", name),
        *ops.all_gather_into_tensor_coalesced([x, x * 2], 2, name),
        *ops.reduce_scatter_tensor_coalesced([x, x * 2], "sum", 2, name),
    ]
    return [ops.wait_tensor(each) for each in started]


def functional_ops(_rank: int, x: Any, group: Any) -> list[Any]:
    ops, name = torch.ops._c10d_functional, group.group_name
    started = [
        ops.all_reduce(x, "sum", name),
        ops.all_gather_into_tensor(x, 2, name),
        ops.reduce_scatter_tensor(x, "sum", 2, name),
        ops.all_to_all_single(x, [3, 3], [3, 3], name),
        ops.broadcast(x, 0, name),
    ]
    return [ops.wait_tensor(each) for each in started]


def all_reduce_max(rank: int, x: Any, group: Any) -> list[Any]:
    return all_reduce(rank, x, group, dist.ReduceOp.MAX)


COLLECTIVES: tuple[Callable[[int, Any, Any], list[Any]], ...] = (
    all_reduce,
    all_reduce_max,
    all_reduce_integers,
    all_gather,
    all_gather_single,
    reduce_scatter_single,
    reduce_scatter,
    all_to_all_even,
    all_to_all_uneven,
    broadcast,
    reduce,
    gather,
    scatter,
    objects,
    send_and_receive,
    exchange,
    coalesced,
    functional_ops,
)
"""Each runs one collective on a group and returns its outputs."""
