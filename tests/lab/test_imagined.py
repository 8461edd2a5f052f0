"""One process as rank 0 of an imagined cluster: right values, times of the model, same bits.

Each world lives in a process of its own, because torch cannot forget a backend.
"""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks

from interlace.errors import InputError, RunError
from interlace.graphs import collectives
from interlace.hardware.cluster import load_cluster
from interlace.ir.graph import Kind
from interlace.lab.imagined_world import ImaginedWorld, imagined_world

RANKS = 4
SLOWER = 500.0  # an a800 collective of some kilobytes takes 18.6 us: here 9.3 ms


def _values(rows: int, ranks: int = RANKS) -> torch.Tensor:
    return torch.arange(float(rows * ranks * 2)).reshape(rows * ranks, 2)


def child_values() -> int:
    cluster = replace(load_cluster("a800"), name="My cluster: 2")  # names are the user's
    with imagined_world(cluster, RANKS) as world:
        assert world.label == "imagined cluster My cluster: 2, world 4"
        group = dist.group.WORLD.group_name
        x = _values(2)
        own = x[:2]
        wait = collectives.wait
        assert torch.equal(wait(collectives.all_gather(own, RANKS, group)), own.repeat(RANKS, 1))
        for op, wanted in {"sum": own * 4, "avg": own, "max": own, "product": own**4}.items():
            assert torch.equal(wait(collectives.reduce_scatter(x, op, RANKS, group)), wanted), op
        for op, wanted in {"sum": x * 4, "avg": x, "min": x, "product": x**4}.items():
            assert torch.equal(wait(collectives.all_reduce(x, op, group)), wanted), op
        splits = [2] * RANKS
        exchanged = wait(collectives.all_to_all(x, splits, splits, group))
        # From rank j comes what this rank sends to the rank j before it.
        assert torch.equal(exchanged, torch.cat([x[0:2], x[6:8], x[4:6], x[2:4]]))
        assert torch.equal(x, _values(2))  # no input was written to
    return 1


def test_values_are_those_of_ranks_that_are_alike() -> None:
    """Through the calls that lowered graphs make."""
    assert run_ranks("test_imagined:child_values", 1)[0].value == 1


def child_functional() -> int:
    with imagined_world(load_cluster("a800"), RANKS):
        ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
        x = _values(1).requires_grad_()
        started = {
            "gather": ops.all_gather_into_tensor(x, RANKS, name),
            "scatter": ops.reduce_scatter_tensor(x, "sum", RANKS, name),
            "reduce": ops.all_reduce(x, "sum", name),
            "exchange": ops.all_to_all_single(x, [1] * RANKS, [1] * RANKS, name),
            "broadcast": ops.broadcast(x, 0, name),
        }
        done = {key: ops.wait_tensor(each).detach() for key, each in started.items()}
        plain = x.detach()
        assert torch.equal(done["gather"], plain.repeat(RANKS, 1))
        assert torch.equal(done["scatter"], plain[:1] * RANKS)
        assert torch.equal(done["reduce"], plain * RANKS)
        assert torch.equal(done["exchange"], plain[[0, 3, 2, 1]])
        assert torch.equal(done["broadcast"], plain)
        places = [torch.empty_like(plain) for _ in range(RANKS)]
        dist.all_gather(places, plain)
        assert all(torch.equal(place, plain) for place in places)
        gathered: list[Any] = [None] * RANKS
        dist.all_gather_object(gathered, {"rank": 0})
        assert gathered == [{"rank": 0}] * RANKS
        dist.barrier()
    return 1


def test_functional_collectives_and_objects_work() -> None:
    """What eager DTensor and torch's own helpers call, also on tensors that need gradients."""
    assert run_ranks("test_imagined:child_functional", 1)[0].value == 1


def child_refusals() -> int:
    with imagined_world(load_cluster("a800"), RANKS):
        x = torch.ones(RANKS)
        with pytest.raises(RunError, match="send needs a real peer"):
            dist.send(x, 1)
        with pytest.raises(RunError, match="gather needs a real peer"):
            dist.gather(x, [torch.empty(RANKS) for _ in range(RANKS)])
        with pytest.raises(RunError, match="would send 1 elements, and 2 are expected"):
            dist.all_to_all_single(torch.empty(5), torch.ones(4), [1, 2, 1, 1], [1, 1, 1, 1])
        with pytest.raises(RunError, match="cannot reduce"):
            dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.BXOR)
    return 1


def test_what_needs_a_real_peer_is_refused() -> None:
    """Point-to-point, rooted and unknown reductions are errors, not wrong numbers."""
    assert run_ranks("test_imagined:child_refusals", 1)[0].value == 1


@pytest.mark.parametrize(
    ("ranks", "slower", "message"),
    [(1, 1.0, "nobody to communicate with"), (4, 0.0, "0.0 times slower")],
)
def test_wrong_worlds_are_refused(ranks: int, slower: float, message: str) -> None:
    """Before torch knows of anything."""
    with (
        pytest.raises(InputError, match=message),
        imagined_world(load_cluster("a800"), ranks, slower=slower),
    ):
        pass
    assert not dist.is_initialized()


def _queued_s(world: ImaginedWorld, count: int) -> tuple[float, list[float]]:
    """(seconds to issue `count` all-gathers, seconds from the start to the end of each)."""
    ends: list[float] = []
    group = dist.group.WORLD.group_name
    start = time.monotonic()
    with torch.no_grad():
        pending = [collectives.all_gather(_values(1), world.ranks, group) for _ in range(count)]
    issued = time.monotonic() - start
    for each in pending:
        future = each.work.get_future()
        future.add_done_callback(lambda _: ends.append(time.monotonic() - start))
    for each in pending:
        collectives.wait(each)
        assert each.work.is_completed()
    deadline = time.monotonic() + 10
    while len(ends) < count and time.monotonic() < deadline:
        time.sleep(0.001)  # a work completes a moment before its callbacks run
    return issued, ends


def child_times() -> list[float]:
    with imagined_world(load_cluster("a800"), RANKS, slower=SLOWER) as world:
        full_bytes = _values(1, RANKS).nbytes * RANKS
        one_s = world.duration_ns(Kind.ALL_GATHER, full_bytes, range(RANKS)) / 1e9
        tries = [_queued_s(world, 5) for _ in range(5)]  # a busy machine may hold one of them up
        assert min(issued for issued, _ in tries) < 5 * one_s  # issuing does not wait
        ends = tries[-1][1]
        assert ends == sorted(ends)
        assert all(end >= number * one_s for number, end in enumerate(ends, 1))
        with world.free_transfers():
            assert world.duration_ns(Kind.ALL_GATHER, full_bytes, range(RANKS)) == 0
        busy = [thread.name for thread in threading.enumerate() if "link" in thread.name]
        assert busy
    left = [thread.name for thread in threading.enumerate() if "link" in thread.name]
    assert not left
    return ends


@pytest.mark.alone
def test_collectives_queue_for_their_link() -> None:
    """Five end in the order of issue, none before its turn; threads end with the world."""
    assert len(run_ranks("test_imagined:child_times", 1)[0].value) == 5


def child_links() -> int:
    from torch.distributed.device_mesh import init_device_mesh

    with imagined_world(load_cluster("a800"), 16, slower=SLOWER) as world:
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("dp", "tp"))
        x = torch.ones(8)
        start = time.monotonic()
        works = [
            dist.all_reduce(x.clone(), group=mesh.get_group(axis), async_op=True)
            for axis in ("dp", "tp", "tp")
        ]
        for work in works:
            work.wait()
        passed_s = time.monotonic() - start
        durations_s = [
            world.duration_ns(Kind.ALL_REDUCE, x.nbytes, ranks) / 1e9
            for ranks in ((0, 8), range(8), range(8))
        ]
        # Both tensor-parallel ones share a queue; the one between hosts has its own.
        assert passed_s >= sum(durations_s[1:])
        assert world.cluster.link_of((0, 8)) == "inter_host"
    return 1


def test_mesh_axes_use_their_links() -> None:
    """On two hosts of eight: one axis inside the hosts, one between them."""
    assert run_ranks("test_imagined:child_links", 1)[0].value == 1


def child_strands() -> dict[str, Any]:
    from strand_world import Case, differences, losses_of, open_world, train

    with imagined_world(load_cluster("a800"), 2, slower=20.0) as imagined:
        world = open_world(Case(), 2)
        one = train(world, world.runner(), 3)
        two = train(world, world.planned(costs=world.costs()), 3)
        shuffled = train(world, world.runner(world.random_plan(3)), 3)
        with imagined.free_transfers():
            free = train(world, world.planned(costs=world.costs()), 3)
        found = {
            "two": differences(one, two),
            "shuffled": differences(one, shuffled),
            "free": differences(one, free),
        }
        losses = losses_of(world.eager(), world.case.batches(0))
        again = losses_of(world.runner(), world.case.batches(0))
        close = [torch.allclose(a, b, rtol=1e-5) for a, b in zip(losses, again, strict=True)]
        finite = all(torch.isfinite(p).all() for p in world.weights.parameters)
    return {"differences": found, "close": all(close), "finite": bool(finite)}


def test_strands_run_in_an_imagined_world() -> None:
    """Two strands, in a planned and a random order and with free transfers, give the bits of one
    strand; eager autograd agrees within rounding; all stays finite."""
    value = run_ranks("test_imagined:child_strands", 1, timeout_s=120)[0].value
    assert value["differences"] == {"two": [], "shuffled": [], "free": []}
    assert (value["close"], value["finite"]) == (True, True)
