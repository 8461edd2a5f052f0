"""Proves that no rank of a resharding hangs: a peer that dies, stalls, fails or never comes is
named by the others in bounded time.

Real processes, real signals; the timeout of the process group is 600 s, so that nothing but the
watchdog of the transfer can end a blocked rank in time.

Wide are a rank that only receives, beside one that sends, and the end of a transfer whose store
goes.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from processes import RankResult, Ranks, gloo_group, run_ranks, start_ranks

from interlace.ranks.watchdog import PEER_EXIT_CODE, STORE_EXIT_CODE
from wide import WIDE

pytestmark = pytest.mark.alone
SURVIVORS_END_WITHIN_S = 5.0
WORLD = 3


def move_for_ever() -> None:
    """A child: 32 MB from ranks 0 and 1 to all three, again and again.

    Prints "n done" between the n-th transfer and the next.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from interlace.reshard import ReshardPlan
    from interlace.reshard.watch import PeerRing

    def print_and_beat(ring: PeerRing, state: str) -> None:
        if state == "done":
            print(ring._number, state, flush=True)
        beat(ring, state)
        if state == "0":
            print(ring._number, "begun", flush=True)

    beat, PeerRing._beat = PeerRing._beat, print_and_beat
    with gloo_group(600):
        source, target = DeviceMesh("cpu", torch.tensor([0, 1])), DeviceMesh("cpu", [0, 1, 2])
        rank = dist.get_rank()
        tensors = None
        if rank < 2:
            local = torch.full((2000, 2000), float(rank))
            tensors = {"x": DTensor.from_local(local, source, [Shard(0)], run_check=False)}
        plan = ReshardPlan.of(tensors, target, [Replicate()])
        for step in range(10**9):
            plan.start(tensors).wait()
            if step == 2:
                print("under way", flush=True)


def pause_on_beginning() -> None:
    """A child: as `move_for_ever`, but rank 2 pauses itself once it has said that it begins."""
    from interlace.reshard.roll import Roll

    def begin(roll: Roll, **how: Any) -> int:
        number = say(roll, **how)
        if number == 3 and os.environ["RANK"] == "2":
            print("pausing", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return number

    say, Roll.begin = Roll.begin, begin
    move_for_ever()


def pause_on_ending(host_stays: bool) -> None:
    """A child: as `move_for_ever`, but rank 2 pauses itself when it has all data of a transfer.

    Nobody waits for its messages any more. Without `host_stays` rank 0 goes on to the next
    transfer as if a launcher hosted the store, else it waits for the end of rank 2.
    """
    from interlace.reshard.watch import PeerRing

    def stop(ring: PeerRing) -> bool:
        if ring._number == 3 and ring._rank == 2:
            print("pausing", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1.0)  # the kernel stops this thread only once the main thread has run
        ring._hosts_store = ring._hosts_store and host_stays
        return leave(ring)

    leave, PeerRing.stop = PeerRing.stop, stop
    move_for_ever()


def lose_the_store_on_beginning() -> None:
    """A child: as `move_for_ever`, but rank 0 is killed when the others begin a transfer."""
    from interlace.reshard.watch import PeerRing

    def join(ring: PeerRing) -> None:
        if ring._number == 4 and ring._rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0 if ring._number == 4 else 0.0)
        write(ring)

    write, PeerRing.join = PeerRing.join, join
    move_for_ever()


def survivors(ranks: Ranks, culprit: int, fault_at: float) -> list[RankResult]:
    """All others, once they have ended: in time, with an error that names the culprit."""
    results = ranks.wait([r for r in range(WORLD) if r != culprit])
    print(f"culprit: {ranks.output(culprit)[-100:]}")
    for result in results:
        after_s = result.ended_at - fault_at
        print(f"rank {result.rank}: exit {result.returncode} after {after_s:.2f} s")
        print(result.stderr)
        assert result.returncode in {1, PEER_EXIT_CODE, STORE_EXIT_CODE}
        assert after_s < SURVIVORS_END_WITHIN_S
        assert f"rank {culprit} (" in result.stderr
        assert f"pid {ranks.pid(culprit)})" in result.stderr
    return results


def in_transfer(ranks: Ranks, rank: int) -> bool:
    """Whether a rank that was paused just now has to beat; between two transfers it need not."""
    threads = Path(f"/proc/{ranks.pid(rank)}/task")
    while any(") T " not in (each / "stat").read_text() for each in threads.iterdir()):
        time.sleep(0.01)
    return not ranks.output(rank).removesuffix("under way\n").endswith("done\n")


@pytest.mark.parametrize(
    ("fault", "culprit"),
    [
        (signal.SIGKILL, 1),
        (signal.SIGSTOP, 0),
        pytest.param(signal.SIGKILL, 2, marks=WIDE),
        pytest.param(signal.SIGSTOP, 2, marks=WIDE),
    ],
)
def test_a_rank_killed_or_paused_in_mid_transfer_is_named(fault: int, culprit: int) -> None:
    """Rank 0 also hosts the store; rank 2 only receives and forwards."""
    with start_ranks("test_reshard_failures:move_for_ever", WORLD, timeout_s=120) as ranks:
        for rank in range(WORLD):
            ranks.wait_for(rank, "under way")
        fault_at = ranks.signal(culprit, fault)
        while fault == signal.SIGSTOP and not in_transfer(ranks, culprit):
            ranks.signal(culprit, signal.SIGCONT)
            time.sleep(0.05)
            fault_at = ranks.signal(culprit, fault)
        survivors(ranks, culprit, fault_at)
        assert ranks.wait([culprit])[0].returncode == -signal.SIGKILL  # also when only paused


def test_a_rank_that_is_paused_on_beginning_a_transfer_is_named() -> None:
    """The others wait for its messages though it may not have beaten yet."""
    with start_ranks("test_reshard_failures:pause_on_beginning", WORLD, timeout_s=30) as ranks:
        ranks.wait_for(2, "pausing")
        assert {result.rank for result in survivors(ranks, 2, time.monotonic())} == {0, 1}


@pytest.mark.parametrize("host_stays", [True, pytest.param(False, marks=WIDE)])
def test_a_rank_that_is_paused_on_ending_a_transfer_is_named(host_stays: bool) -> None:
    """By those who wait for it in the next transfer, and not the rank that waits for its end."""
    target = "test_reshard_failures:pause_on_ending"
    with start_ranks(target, WORLD, args=[host_stays], timeout_s=90) as ranks:
        ranks.wait_for(2, "pausing")
        assert {result.rank for result in survivors(ranks, 2, time.monotonic())} == {0, 1}


def test_a_store_that_is_lost_on_beginning_a_transfer_is_named() -> None:
    """The first beat finds no store; the errors name the rank that hosted it."""
    target = "test_reshard_failures:lose_the_store_on_beginning"
    with start_ranks(target, WORLD, timeout_s=60) as ranks:
        ranks.wait([0])
        for result in survivors(ranks, 0, time.monotonic()):
            assert "hosted the store, died" in result.stderr


def fail_alone(how: str) -> None:
    """A child: rank 1 does not do its part; all say what they learn of it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from interlace.errors import InterlaceError
    from interlace.reshard import ReshardPlan, Settings, reshard

    with gloo_group(600):
        mesh, settings = DeviceMesh("cpu", [0, 1, 2]), Settings(timeout_s=3.0)
        faulty = dist.get_rank() == 1
        local = torch.ones(4, 6)
        x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        dist.barrier()  # importing takes ranks that share a core unequally long
        try:
            if how == "never calls":
                if not faulty:
                    reshard(x, mesh, [Replicate()], settings=settings)
            else:
                plan = ReshardPlan.of({"x": x}, mesh, [Replicate()], settings=settings)
                if not faulty:
                    plan.start({"x": x}).wait()
                elif how == "starts with another tensor":
                    plan.start({"x": x.to(torch.float64)})
        except InterlaceError as error:
            print(f"{type(error).__name__}: {error.message}", flush=True)
        assert torch.equal(local, torch.ones(4, 6))
        if faulty:
            time.sleep(8.0)  # alive: the others must not wait for its end


@pytest.mark.parametrize(
    ("how", "of_others", "of_faulty"),
    [
        ("never calls", "PeerError: rank 1 has not joined the resharding within 3 s", ""),
        ("never starts", "PeerError: rank 1 has not begun transfer 1 of plan 1 within 3 s", ""),
        (
            "starts with another tensor",
            "PeerError: rank 1 refused to begin transfer 1 of plan 1: given 'x' float64[12, 6] "
            "(S(0)), planned 'x' float32[12, 6] (S(0))",
            "InputError: given 'x' float64[12, 6] (S(0)), planned 'x' float32[12, 6] (S(0))",
        ),
    ],
)
def test_a_rank_that_does_not_do_its_part_is_named(
    how: str, of_others: str, of_faulty: str
) -> None:
    with start_ranks("test_reshard_failures:fail_alone", WORLD, args=[how], timeout_s=120) as ranks:
        results = ranks.wait([0, 2])
        assert 1 in ranks.running(), ranks.report()
        assert ranks.output(1).strip() == of_faulty
    for result in results:
        assert result.stdout.strip() == of_others, result


def wrong_calls() -> dict[str, str]:
    """A child: calls that must be refused, by what is wrong with them, with what each rank says."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    import interlace
    from interlace.errors import InputError
    from interlace.reshard import Move, ReshardPlan, Settings

    with gloo_group(60):
        rank = dist.get_rank()
        pair, all_three = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
        square = DeviceMesh("cpu", [[0], [1]])
        local = torch.full((4, 6), float(rank))

        def on(mesh: DeviceMesh, part: torch.Tensor = local) -> DTensor | None:
            inside = rank in mesh.mesh.flatten().tolist()
            return DTensor.from_local(part, mesh, [Shard(0)], run_check=False) if inside else None

        def plan(dtype: torch.dtype, **changes: object) -> ReshardPlan:
            move = {"shape": (8, 6), "dtype": dtype, "src_mesh": pair, "dst_mesh": all_three}
            places = {"src_placements": [Shard(0)], "dst_placements": [Replicate()]}
            return ReshardPlan({"x": Move(**(move | places | changes))})

        def plan_only() -> None:
            plan(torch.float32)

        odd = torch.float16 if rank == 1 else torch.float32
        uneven = DTensor.from_local(
            local[: 4 - rank], pair, [Replicate()], run_check=False, shape=(4, 6), stride=(6, 1)
        )
        other = {"x": on(all_three)}
        calls = {
            "no tensor": lambda: interlace.reshard(None, pair, [Shard(0)]),
            "too few placements": lambda: interlace.reshard(on(pair), square, [Shard(0)]),
            "dimension": lambda: interlace.reshard(on(pair), pair, [Shard(2)]),
            "partial": lambda: interlace.reshard(on(pair), pair, [Partial()]),
            "dtype differs": lambda: interlace.reshard(on(pair, local.to(odd)), pair, [Shard(1)]),
            "not on src_mesh": lambda: interlace.reshard(
                on(all_three), all_three, [Shard(1)], all_three if rank else pair
            ),
            "local shape": lambda: interlace.reshard(
                uneven if rank < 2 else None, pair, [Shard(0)]
            ),
            "destination differs": lambda: interlace.reshard(
                on(pair), pair, [Shard(1) if rank == 2 else Shard(0)]
            ),
            "described apart": lambda: plan(odd),
            "settings differ": lambda: interlace.reshard(
                on(pair), pair, [Shard(1)], settings=Settings(chunk_bytes=8 * (1 + rank))
            ),
            "strategy": lambda: interlace.reshard(
                on(pair), pair, [Shard(1)], settings=Settings(strategy="ring")
            ),
            "memory": lambda: Settings(memory_bytes=10),
            "unknown name": lambda: plan(torch.float32).start({"y": None}),
            "missing name": lambda: plan(torch.float32).start({}) if rank < 2 else plan_only(),
            "wrong mesh": lambda: plan(torch.float32).start(other) if rank < 2 else plan_only(),
        }
        found = {}
        for what, call in calls.items():
            try:
                call()
                found[what] = "nothing"
            except InputError as error:
                found[what] = error.message if error.hint else "no hint"
        assert torch.equal(local, torch.full((4, 6), float(rank)))
        dist.barrier()  # rank 0 hosts the store
        return found


REFUSED = {
    "no tensor": "no rank gave a tensor",
    "too few placements": "x: dst: 1 placements for a mesh of 2 axes",
    "dimension": "x: dst: Shard(dim=2) for a tensor of 2 dimensions",
    "partial": "x: dst: a destination cannot be partial",
    "dtype differs": "rank 1 has 'x' float16[8, 6] (S(0)) where rank 0 has 'x' float32[8, 6] "
    "(S(0))",
    "not on src_mesh": "a tensor is not on src_mesh, whose ranks are [0, 1]",
    "local shape": "x: this rank holds [3, 6] where its placements say [4, 6]",
    "destination differs": "rank 2 has another destination than rank 0: (S(1)) on a 2 mesh of "
    "ranks [0, 1], not (S(0)) on a 2 mesh of ranks [0, 1]",
    "described apart": "rank 1 has another description than rank 0: 'x' float16[8, 6] (S(0)) on a "
    "2 mesh of ranks [0, 1] to (R) on a 3 mesh of ranks [0, 1, 2], not 'x' float32[8, 6]",
    "settings differ": "rank 1 has another plan than rank 0",
    "strategy": "unknown strategy 'ring'",
    "memory": "memory_bytes = 10",
    "unknown name": "the plan has no tensor 'y'",
    "missing name": "'x' is missing",
    "wrong mesh": "given 'x' float32[12, 6] (S(0)) on ranks [0, 1, 2], planned 'x' float32[8, 6]",
}
ONE_RANK_IS_WRONG = {"not on src_mesh": 0, "local shape": 1}
NOT_ON_RANK_2 = {"missing name", "wrong mesh"}


def test_wrong_calls_are_refused_by_all_ranks_alike() -> None:
    """With the reason on the rank that is wrong, and its name on the others; the sources stay."""
    results = run_ranks("test_reshard_failures:wrong_calls", WORLD, timeout_s=120)
    for result in results:
        assert result.value.keys() == REFUSED.keys()
        for what, message in result.value.items():
            culprit = ONE_RANK_IS_WRONG.get(what, result.rank)
            refused = f"rank {culprit} refused: " if culprit != result.rank else ""
            if result.rank == 2 and what in NOT_ON_RANK_2:
                assert message == "nothing"
            else:
                assert message.startswith(refused + REFUSED[what]), (result.rank, what, message)
