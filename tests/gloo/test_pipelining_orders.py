"""Orders of ours on PyTorch's own pipeline runtime: the gradients of eager code."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from stage_models import (
    call,
    close,
    compare,
    data,
    eager,
    in_order,
    loss_of,
    mlps,
    own_stages,
    pairs,
)
from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    ScheduleDualPipeV,
    _PipelineScheduleRuntime,
)

from interlace.errors import InputError
from interlace.ir.actions import Action, backward, forward, together
from interlace.pipelining import torch_schedule

ORDERS = {"eager_one_f_one_b": 1, "zb_h1": 1, "folded": 2, "eager_folded": 2, "stp": 2}


def one_at_a_time(
    ranks: int, micro_batches: int, chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """An order of a user's own: a micro-batch goes to the end and back before the next one."""
    return tuple(
        tuple(
            action
            for k in range(1, micro_batches + 1)
            for action in (
                *(together(forward(k, c)) for c in range(rank, ranks * chunks, ranks)),
                *(together(backward(k, c)) for c in reversed(range(rank, ranks * chunks, ranks))),
            )
        )
        for rank in range(ranks)
    )


def every_order(count: int) -> dict[str, Any]:
    """Which order ran how many times two passes in one action."""
    with gloo_group(60):
        overlaps: dict[str, Any] = {}
        for order, chunks in {**ORDERS, one_at_a_time: 2}.items():
            total = chunks * dist.get_world_size()
            twins, own = mlps(total), own_stages(mlps(total), order)
            batch = data(count)
            losses, outputs = eager(in_order(twins), loss_of, pairs(batch, count))
            schedule = torch_schedule(own, count, loss_of, schedule=order)
            assert isinstance(schedule, _PipelineScheduleRuntime)
            found, found_losses = call(schedule, batch)
            assert compare(own, twins) == 4 * len(own)
            if own[-1].is_last:
                close(found, torch.cat(outputs))
                close(torch.stack(found_losses), torch.stack(losses))
            mine = schedule.pipeline_order_with_comms[dist.get_rank()]
            overlaps[str(order)] = sum(a.computation_type == OVERLAP_F_B for a in mine)
        wrong = own_stages(mlps(dist.get_world_size()), "gpipe")
        with pytest.raises(InputError, match="zb_v runs two chunks on each rank"):
            torch_schedule(wrong, count, loss_of, schedule="zb_v")
        return overlaps


@pytest.mark.parametrize(("ranks", "count"), [(2, 5), (4, 9)])
def test_torch_runs_our_orders(ranks: int, count: int) -> None:
    """One stage on a rank and two, backwards in halves, two passes in an action, a user's own."""
    for result in run_ranks(
        "test_pipelining_orders:every_order", ranks, args=[count], timeout_s=90
    ):
        assert result.value["folded"] > 0
        assert result.value["zb_h1"] == 0


def same_as_theirs() -> None:
    """Our `dual_pipe_v` there gives the bits of PyTorch's own, as it is the same order."""
    with gloo_group(60):
        found = []
        for make in (
            lambda own: torch_schedule(own, 4, loss_of, schedule="dual_pipe_v"),
            lambda own: ScheduleDualPipeV(own, 4, loss_of),
        ):
            own = own_stages(mlps(4), "dual_pipe_v")
            call(make(own), data(4))
            found.append([p.grad for stage in own for p in stage.submod.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_dual_pipe_v_is_that_of_torch() -> None:
    """Bit by bit."""
    run_ranks("test_pipelining_orders:same_as_theirs", 2, timeout_s=60)
