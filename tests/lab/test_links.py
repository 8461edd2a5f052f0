"""The emulated link gives gloo's own bits, never earlier than the link would have them.

Two real processes per test; every number compared with plain gloo is compared bit for bit.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import COLLECTIVES
from processes import run_ranks, start_ranks

from interlace.errors import InputError
from interlace.lab.links import describe, emulated_backend

FAST_BITS = 10**12  # no duration to speak of, for tests of values


def _open(rate_bits: int, latency_us: float) -> tuple[int, Any]:
    """The emulated default group; returns the rank and a plain gloo group beside it."""
    backend = emulated_backend(rate_bits, latency_us)
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    return dist.get_rank(), dist.new_group(backend="gloo")


def child_values() -> list[str]:
    rank, gloo = _open(FAST_BITS, 0.0)
    same = []
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    for collective in COLLECTIVES:
        name = collective.__name__
        wanted, got = (collective(rank, x, group) for group in (gloo, dist.group.WORLD))
        assert len(wanted) == len(got), name
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True)), name
        same.append(name)
    dist.destroy_process_group()
    return same


def test_every_collective_gives_the_bits_of_gloo() -> None:
    """Each way of calling a collective, on both groups, on two ranks."""
    results = run_ranks("test_links:child_values", 2)
    assert [result.value for result in results] == [[each.__name__ for each in COLLECTIVES]] * 2


def child_dtensor() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    rank, _ = _open(FAST_BITS, 0.0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    full = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))
    sharded = distribute_tensor(full, mesh["tensor"], [Shard(0)])
    moved = sharded.redistribute(placements=[Shard(1)])
    assert torch.equal(moved.to_local(), full.chunk(2, 1)[rank])
    assert torch.equal(moved.redistribute(placements=[Replicate()]).to_local(), full)
    partial = type(sharded).from_local(full, mesh["tensor"], [Partial()])
    assert torch.equal(partial.redistribute(placements=[Shard(0)]).full_tensor(), full * 2)
    product = torch.mm(sharded.t(), sharded)
    assert torch.allclose(product.full_tensor(), full.t() @ full, atol=1e-5)
    groups = {axis: mesh.get_group(axis) for axis in ("data", "tensor")}
    backends = {axis: dist.get_backend(group) for axis, group in groups.items()}
    dist.destroy_process_group()
    return backends


def test_dtensor_and_device_mesh_use_the_link() -> None:
    """Groups that a mesh makes from the default group are emulated too, and redistribute works."""
    wanted = emulated_backend(FAST_BITS, 0.0)
    for result in run_ranks("test_links:child_dtensor", 2):
        assert result.value == {"data": wanted, "tensor": wanted}


RATE_BITS = 80_000_000  # 10 bytes per microsecond
LATENCY_US = 20_000.0
PAYLOAD_BYTES = 400_000


def child_durations() -> dict[str, float]:
    """Seconds of each operation on a full tensor of PAYLOAD_BYTES."""
    rank, gloo = _open(RATE_BITS, LATENCY_US)
    full = torch.ones(PAYLOAD_BYTES // 4)
    half = torch.ones(PAYLOAD_BYTES // 8)
    ops = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name

    def point_to_point() -> None:
        if rank == 0:
            dist.send(full, 1)
        else:
            dist.recv(full, 0)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: ops.wait_tensor(ops.all_gather_into_tensor(half, 2, name)),
        "reduce_scatter": lambda: ops.wait_tensor(ops.reduce_scatter_tensor(full, "sum", 2, name)),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(full), full),
        "broadcast": lambda: dist.broadcast(full, 0),
        "point_to_point": point_to_point,
        "barrier": dist.barrier,
    }
    seconds = {}
    for key, call in calls.items():
        dist.barrier(group=gloo)
        started = time.monotonic()
        call()
        seconds[key] = time.monotonic() - started
    dist.destroy_process_group()
    return seconds


def test_nothing_is_faster_than_the_link() -> None:
    """Lower bounds: latency + wire bytes / rate, from the textbook bytes of each collective."""
    wire_bytes = {
        "all_reduce": PAYLOAD_BYTES,
        "all_gather": PAYLOAD_BYTES / 2,
        "reduce_scatter": PAYLOAD_BYTES / 2,
        "all_to_all": PAYLOAD_BYTES / 2,
        "broadcast": PAYLOAD_BYTES,
        "point_to_point": PAYLOAD_BYTES,
        "barrier": 0,
    }
    for result in run_ranks("test_links:child_durations", 2):
        for name, wire in wire_bytes.items():
            wanted_s = LATENCY_US / 1e6 + wire * 8 / RATE_BITS
            assert result.value[name] >= wanted_s, name
            assert result.value[name] < wanted_s + 5, name  # guards against a hang only


def child_order() -> dict[str, Any]:
    """Three all-reduces issued at once, by their callbacks, while the main thread multiplies."""
    _open(RATE_BITS, 0.0)
    payloads = [torch.ones(PAYLOAD_BYTES // 4 // parts) for parts in (2, 4, 1)]
    dist.barrier()
    ended: list[tuple[int, float, bool]] = []
    started = time.monotonic()
    works = [dist.all_reduce(payload, async_op=True) for payload in payloads]
    for index, work in enumerate(works):

        def note(_: Any, index: int = index) -> None:
            is_main = threading.current_thread() is threading.main_thread()
            ended.append((index, time.monotonic() - started, is_main))

        work.get_future().add_done_callback(note)
    a = torch.randn(512, 512)
    products = 0
    while not works[-1].is_completed():
        a = torch.nn.functional.normalize(a @ a)
        products += 1
    works[-1].wait()
    dist.destroy_process_group()
    del works, work  # each keeps its link, and so the thread
    limit = time.monotonic() + 10
    while any("interlace" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < limit, threading.enumerate()
        time.sleep(0.01)
    return {"ended": ended, "products": products}


def test_one_link_is_a_queue_that_runs_beside_compute() -> None:
    """Issue order is completion order, times add up, callbacks come while compute goes on."""
    wire_s = PAYLOAD_BYTES * 8 / RATE_BITS
    for result in run_ranks("test_links:child_order", 2):
        ended = result.value["ended"]
        assert [index for index, _, _ in ended] == [0, 1, 2]
        for (_, at_s, is_main), share in zip(ended, (0.5, 0.75, 1.75), strict=True):
            assert at_s >= share * wire_s
            assert not is_main
        assert result.value["products"] >= 1


def child_receive_is_charged() -> float:
    """A receive posted long before its message is sent still takes the time of the message."""
    rank, gloo = _open(RATE_BITS, 0.0)
    payload = torch.full((PAYLOAD_BYTES // 4,), float(rank))
    dist.barrier(group=gloo)
    if rank == 1:
        work = dist.irecv(payload, 0)
        dist.barrier(group=gloo)
        started = time.monotonic()
    else:
        time.sleep(2 * PAYLOAD_BYTES * 8 / RATE_BITS)
        dist.barrier(group=gloo)
        started = time.monotonic()
        work = dist.isend(payload, 1)
    work.wait()
    seconds = time.monotonic() - started
    assert payload.eq(0.0).all()
    dist.destroy_process_group()
    return seconds


def test_an_early_receive_waits_for_its_message_to_cross() -> None:
    """Otherwise every pipeline that posts receives ahead would look free."""
    for result in run_ranks("test_links:child_receive_is_charged", 2):
        assert result.value >= 0.9 * PAYLOAD_BYTES * 8 / RATE_BITS  # ranks leave a barrier apart


def child_dead_peer(how: str) -> dict[str, str]:
    rank, _ = _open(FAST_BITS, 0.0)
    ops = torch.ops._c10d_functional
    x = torch.ones(1 << 20)
    dist.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failing: dict[str, Callable[[], Any]] = {
        "work": lambda: dist.all_reduce(x),
        "functional": lambda: ops.wait_tensor(
            ops.all_reduce(x, "sum", dist.group.WORLD.group_name)
        ),
        "future": lambda: dist.all_reduce(x, async_op=True).get_future().wait(),
        "receive": lambda: dist.recv(x, 1),
    }
    try:
        failing[how]()
    except RuntimeError as error:
        print(f"gloo said: {error}", flush=True)
        # With the peer gone, orderly destruction is not what this test is about.
        os._exit(7)
    return {}


@pytest.mark.parametrize("how", ["work", "functional", "future", "receive"])
def test_a_dead_peer_fails_the_operation_as_in_gloo(how: str) -> None:
    """Rank 1 is killed; every way of waiting on rank 0 raises gloo's error."""
    survivor, killed = run_ranks("test_links:child_dead_peer", 2, args=[how], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert survivor.returncode == 7, survivor.stderr
    assert "gloo" in survivor.stdout.lower()


def child_timeout() -> str:
    _, gloo = _open(1_000, 0.0)  # a byte takes 8 ms
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    message = ""
    try:
        work.wait(timedelta(seconds=0.1))
    except RuntimeError as error:
        message = str(error)
    dist.barrier(group=gloo)
    sys.stdout.flush()
    os._exit(0 if message == "the operation did not finish within 0.1 s" else 1)


def test_a_wait_with_a_time_limit_ends() -> None:
    """`work.wait(timeout)` raises when the link is still busy; the process can end regardless."""
    run_ranks("test_links:child_timeout", 2)


def child_waits() -> None:
    _open(1_000, 0.0)
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    print("waiting", flush=True)
    work.wait()


def test_ctrl_c_reaches_a_rank_that_waits_for_the_link() -> None:
    """SIGINT ends the wait with KeyboardInterrupt: the main thread does not block in C++."""
    with start_ranks("test_links:child_waits", 2) as ranks:
        for rank in (0, 1):
            ranks.wait_for(rank, "waiting")
        for rank in (0, 1):
            ranks.signal(rank, signal.SIGINT)
        for result in ranks.wait():
            assert "KeyboardInterrupt" in result.stderr


def test_names_are_registered_once_and_labels_are_readable() -> None:
    """Equal pairs share a backend, different pairs do not, and the label has units."""
    assert emulated_backend(250_000_000, 50) == emulated_backend(250_000_000, 50.0)
    assert emulated_backend(250_000_000, 50) != emulated_backend(250_000_000, 50.0001)
    assert describe(250_000_000, 50.0) == "emulated link 250 Mbit/s, 50 us"
    assert describe(2_500_000_000, 0.5) == "emulated link 2.5 Gbit/s, 0.5 us"
    assert describe(64_000, 0) == "emulated link 64 kbit/s, 0 us"
    assert describe(9, 0) == "emulated link 9 bit/s, 0 us"


@pytest.mark.parametrize(
    ("rate_bits", "latency_us"),
    [(0, 1.0), (-5, 1.0), (10**6, -1.0), (10**6, float("nan")), (10**6, float("inf"))],
)
def test_impossible_links_are_refused(rate_bits: int, latency_us: float) -> None:
    """A link needs a positive rate and a finite latency; the hint names what to set."""
    with pytest.raises(InputError, match="link") as caught:
        emulated_backend(rate_bits, latency_us)
    assert "set link." in caught.value.hint
