"""Proves that tensors of two steps or of two plans never meet in one result.

Ranks that start, refuse, leave out or drop different transfers get the right tensors, or an error
that names the rank at fault; and none of them waits for ever.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch.distributed as dist
from processes import gloo_group, run_ranks, start_ranks

from interlace.errors import PeerError
from interlace.ranks.ending import PEER_EXIT_CODE, STORE_EXIT_CODE

pytestmark = pytest.mark.gloo
WORLD = 3


class Rows:
    """In a child: rows of ranks 0 and 1 that rank 2 gets, all of them equal to the step."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self.rank = dist.get_rank()
        self.source, self.target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2])

    def of(self, step: int, dtype: str = "float32", size: int = 2) -> dict[str, Any] | None:
        import torch
        from torch.distributed.tensor import DTensor, Shard

        if self.rank == 2:
            return None
        local = torch.full((size,), step, dtype=getattr(torch, dtype))
        return {"x": DTensor.from_local(local, self.source, [Shard(0)], run_check=False)}

    def plan(self, size: int = 2, placements: Any = None, **settings: Any) -> Any:
        from torch.distributed.tensor import Replicate

        from interlace.reshard import ReshardPlan, Settings

        given = Settings(**({"watch": False, "timeout_s": 20.0} | settings))
        places = placements or [Replicate()]
        return ReshardPlan.of(self.of(0, size=size), self.target, places, settings=given)


def shown(result: Mapping[str, Any]) -> str:
    """The values that a rank got."""
    return "nothing" if result["x"] is None else str(result["x"].to_local().int().unique().tolist())


def said(error: Exception) -> str:
    """An error, and whom it names."""
    ranks = list(error.ranks) if isinstance(error, PeerError) else ""
    return f"{type(error).__name__}{ranks}: {str(error).splitlines()[0]}"


def begin(rows: Rows, plan: Any, step: int, culprit: int, how: str) -> Any:
    """Starts a step. The culprit does it wrongly at step 2, and goes on as if nothing was."""
    import torch

    from interlace.errors import InputError

    if step != 2 or rows.rank != culprit:
        return plan.start(rows.of(step))
    handle = None
    if how == "starts twice":
        handle = plan.start(rows.of(2))
    wrong = {
        "gives another dtype": rows.of(2, "float64"),
        "gives another shape": rows.of(2, size=5),
        "gives no DTensor": {"x": torch.ones(2)},
        "gives no mapping": 7,
        "gives an unknown name": {"y": None},
        "starts twice": rows.of(3),
    }
    try:
        plan.start(wrong[how])
    except InputError:
        pass  # as a careless caller does
    except AttributeError:
        assert how == "gives no mapping"
    return handle


MISTAKES = {
    "gives another dtype": (1, "given 'x' float64[4] (S(0)), planned 'x' float32[4] (S(0))"),
    "gives another shape": (1, "given 'x' float32[10] (S(0)), planned 'x' float32[4] (S(0))"),
    "gives no DTensor": (0, "'x' is of type Tensor, not a DTensor"),
    "gives no mapping": (0, "AttributeError: 'int' object has no attribute 'keys'"),
    "gives an unknown name": (2, "the plan has no tensor 'y'"),
    "starts twice": (1, "transfer 2 of plan {} is still under way"),
}


def careless_callers() -> dict[str, list[str]]:
    """A child: three steps with each mistake; what every rank gets of them.

    Rank 2 looks at what came of step 2 only when the culprit has gone on to step 3.
    """
    found: dict[str, list[str]] = {}
    with gloo_group(60) as store:
        rows = Rows()
        for how, (culprit, _) in MISTAKES.items():
            plan, got = rows.plan(), found.setdefault(how, [])
            for step in (1, 2, 3):
                handle = None
                try:
                    handle = begin(rows, plan, step, culprit, how)
                    if handle is None:
                        got.append("refused")
                except Exception as error:
                    got.append(said(error))
                if step == 3 and rows.rank == culprit:
                    store.set(f"{how}: went on", "")
                if step == 2 and rows.rank == 2 != culprit and how != "starts twice":
                    store.wait([f"{how}: went on"])
                if handle is not None:
                    got.append(outcome(handle.wait))
        store_barrier(store, "end")  # rank 0 hosts the store
    return found


def outcome(wait: Callable[[], Mapping[str, Any]]) -> str:
    """What a rank gets: values or an error."""
    try:
        got = shown(wait())
    except Exception as error:
        got = said(error)
    print(got, flush=True)  # seen if the test fails
    return got


def store_barrier(store: dist.Store, name: str, ranks: int = WORLD) -> None:
    """Not by the process group, in which messages may be left over."""
    store.add(name, 1)
    while store.add(name, 0) < ranks:
        time.sleep(0.01)


def test_a_refused_start_never_lets_two_steps_meet() -> None:
    """Whoever went on without a step begins no other, and its peers name it and its reason."""
    results = run_ranks("test_reshard_order:careless_callers", WORLD, timeout_s=60)
    for plan, (how, (culprit, why)) in enumerate(MISTAKES.items(), start=1):
        at = 3 if how == "starts twice" else 2
        refusal = f"transfer {at} of plan {plan}: {why.format(plan)}"
        for result in results:
            first, second, third = result.value[how]
            right = "[{}]" if result.rank == 2 else "nothing"
            assert first == right.format(1)
            if result.rank == culprit:
                assert second == (right.format(2) if at == 3 else "refused")
                where, why_not = refusal.split(": ", 1)
                assert third.startswith(("InputError: ", "RunError: "))
                assert f"closed on this rank, since {where} was refused: {why_not}" in third
                continue
            if at == 3:
                assert second == right.format(2)
            for got in (third,) if at == 3 else (second, third):
                if got == "nothing":  # its rows were taken before the error was known
                    assert result.rank != 2 != culprit
                    continue
                assert got.startswith(f"PeerError[{culprit}]: "), (how, result.rank, got)
                assert f"rank {culprit} refused to begin {refusal}" in got


def two_plans() -> list[str]:
    """A child: two plans of equal tensors, used in different orders; what every rank gets."""
    found: list[str] = []
    with gloo_group(60) as store:
        rows = Rows()
        one_by_one = {"outstanding": 1, "chunk_bytes": 16}
        plans = [rows.plan(size=64, **one_by_one) for _ in range(2)]
        values = dict(zip(plans, (7, 8), strict=True))
        for swapped in ("start", "wait"):
            ours = plans if rows.rank else plans[::-1]
            handles = {
                plan: plan.start(rows.of(values[plan], size=64))
                for plan in (ours if swapped == "start" else plans)
            }
            # Each waits for messages that the other issues when it waits in turn.
            got = {plan: outcome(handles[plan].wait) for plan in ours}
            assert handles[plans[0]].wait() is handles[plans[0]].wait()
            found += [got[plan] for plan in plans]
        for name in ("first", "second") if rows.rank == 1 else ("second", "first"):
            found.append(outcome(lambda name=name: rows.plan(name=name)))
        found.append(outcome(lambda: rows.plan(placements=places_nothing(rows.rank))))
        found.append(outcome(lambda: waits_for_another(rows)))
        found.append(outcome(lambda: another_step(rows)))
        found.append(outcome(lambda: comes_late(rows, store)))
        store_barrier(store, "end")
    return found


def places_nothing(rank: int) -> Any:
    """A function of the caller that fails on rank 1."""
    from torch.distributed.tensor import Replicate

    return lambda name: ({} if rank == 1 else {name: [Replicate()]})[name]


def waits_for_another(rows: Rows) -> dict[str, Any]:
    """Rank 2 takes the second of two plans first."""
    plans = [rows.plan(timeout_s=1.0) for _ in range(2)]
    return plans[rows.rank == 2].start(rows.of(1)).wait()


def another_step(rows: Rows) -> dict[str, Any]:
    """Rank 1 has left out a step; the count of transfers cannot tell."""
    plan, step = rows.plan(), 6 if rows.rank == 1 else 5
    return plan.start(rows.of(step), step=step).wait()


def comes_late(rows: Rows, store: dist.Store) -> dict[str, Any]:
    """Rank 1 starts when the others have given up, and starts again after that."""
    plan = rows.plan(timeout_s=1.0)
    if rows.rank == 1:
        store.wait(["given up"])
    handle = plan.start(rows.of(1))
    try:
        return handle.wait()
    except PeerError:
        again = [outcome(handle.wait), outcome(lambda: plan.start(rows.of(2)).wait())]
        assert "the plan is closed on this rank" in again[1]
        assert again[1].endswith(f"failed: {again[0].split(': ', 1)[1]}")
        raise
    finally:
        if rows.rank == 2:
            store.set("given up", "")


def test_two_plans_in_any_order_give_the_right_tensors_or_name_the_rank() -> None:
    results = run_ranks("test_reshard_order:two_plans", WORLD, timeout_s=60)
    for result in results:
        got, rank, error = iter(result.value), result.rank, "PeerError"
        for _ in ("started in different orders", "waited for in different orders"):
            assert [next(got), next(got)] == (["[7]", "[8]"] if rank == 2 else ["nothing"] * 2)
        for ours, theirs in (("second", "first"), ("first", "second")):  # 3 and 4 are not made
            assert next(got) == (
                f"InputError: rank 1 makes plan '{theirs}' where rank 0 makes plan '{ours}'"
            )
        assert next(got) == (
            "KeyError: 'x'" if rank == 1 else "InputError: rank 1 refused: KeyError: 'x'"
        )
        waits, has = (7, "rank 0 has") if rank == 2 else (6, "rank 2 has")
        what, instead = (f"transfer 1 of plan {plan}" for plan in (waits, 13 - waits))
        said, _, more = next(got).partition("; ")
        assert said == f"{error}[{has[5]}]: {has} not begun {what} within 1 s"
        # Whoever looks second finds that the other has given up its own by then.
        assert more in ("", f"it has begun {instead}, which this rank has not")
        steps = next(got)
        if rank == 0:  # it may have sent all before it hears of the others
            met = ("rank 1 began", "as step 6", "rank 2", "as step 5")
            assert steps == "nothing" or (
                steps.startswith(f"{error}[1, 2]: ") and all(each in steps for each in met)
            )
        else:
            step, other = (6, 5) if rank == 1 else (5, 6)
            assert steps == (
                f"{error}[{3 - rank}, {rank}]: rank {3 - rank} began transfer 1 of plan 8 as step "
                f"{other}, rank {rank} as step {step}"
            )
        late = "rank 1 has not begun transfer 1 of plan 9 within 1 s"
        gave_up = f"{error}[1]: rank 2 gave up transfer 1 of plan 9: {late}"
        assert next(got) == ("nothing", gave_up, f"{error}[1]: {late}")[rank]


def drop_a_handle(how: str) -> None:
    """A child: rank 1 begins the second transfer, and will not wait for it; its watchdog runs."""
    from interlace.errors import InterlaceError

    with gloo_group(600) as store:
        rows = Rows()
        plan = rows.plan(size=64, watch=True, outstanding=1, chunk_bytes=16)
        plan.start(rows.of(1, size=64)).wait()
        handle = plan.start(rows.of(2, size=64))
        if rows.rank == 1:
            store.wait(["blocked"])
            time.sleep(0.5)  # both others are in gloo
            print("fault", flush=True)
        elif rows.rank == 2:
            handle.progress()
            store.set("blocked", "")
        try:
            if rows.rank != 1:
                handle.wait()
            elif how == "is dropped":
                del handle
            else:
                for _ in range(2):
                    print(outcome(lambda: plan.start(rows.of(3, size=64)).wait()), flush=True)
        except InterlaceError as error:
            print(said(error), flush=True)
        if rows.rank == 1:
            time.sleep(2.5)  # longer than a process has to end after an error of its own
            print(outcome(lambda: plan.start(rows.of(3, size=64)).wait()), flush=True)
            time.sleep(60)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("is dropped", "the handle of transfer 2 of plan 1 was dropped before wait"),
        (
            "is forgotten",
            "start was called again and again before wait for transfer 2 of plan 1",
        ),
    ],
)
def test_a_transfer_that_nobody_will_wait_for_ends_on_all_ranks(how: str, why: str) -> None:
    """Others are blocked in gloo, and rank 1 lives: nothing but its own word can end them."""
    closed = f"RunError: the plan is closed on this rank, since transfer 2 of plan 1 failed: {why}"
    with start_ranks("test_reshard_order:drop_a_handle", WORLD, args=[how], timeout_s=60) as ranks:
        ranks.wait_for(1, "fault")
        fault_at = time.monotonic()
        for result in ranks.wait([2]):  # rank 0 has sent all of its own by now, or is told as well
            print(result)
            assert result.ended_at - fault_at < 5.0
            said = result.stderr + result.stdout
            if result.returncode == STORE_EXIT_CODE:
                # Rank 0, which hosts the store here, was told first and took the store with it.
                said = "".join(each.stderr + each.stdout for each in ranks.wait([0]))
            else:
                assert result.returncode == PEER_EXIT_CODE or "PeerError[1]" in result.stdout
            assert f"pid {ranks.pid(1)}) failed: {why}" in said
        ranks.wait_for(1, closed)
        assert 1 in ranks.running()


def test_plans_that_nccl_would_mix_are_refused() -> None:
    """It tells messages apart by their order alone, which the ranks compare before they return."""
    from interlace.reshard.roll import Roll

    store = dist.HashStore()
    rolls = {
        (rank, plan): Roll(dist.PrefixStore(plan, store), rank, f"plan {plan}")
        for rank in (0, 1)
        for plan in ("a", "b")
    }
    for rank, order in ((0, "ab"), (1, "ab"), (0, "ab"), (1, "ba")):
        for plan in order:
            roll = rolls[rank, plan]
            turn = 2 * roll.number + order.index(plan) + 1
            roll.begin(turns={1 - rank: turn})
            roll.end()
        if rank == 1 and order == "ab":
            assert all(rolls[rank, plan].begun(1 - rank, 1) for plan in "ab")
    for (rank, _), roll in rolls.items():
        with pytest.raises(PeerError, match=r"ranks . and . begin transfers in different orders"):
            roll.begun(1 - rank, 2)
