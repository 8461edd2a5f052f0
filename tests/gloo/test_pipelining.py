"""Interlace behind PyTorch's pipeline interface, judged by the scenarios of PyTorch's own tests."""

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

from interlace.config import PlanConfig
from interlace.pipelining import PipelineSchedule

QUICK = PlanConfig(profile_repeats=1, cache=False)
SCHEDULES = {
    "gpipe": 1, "one_f_one_b": 1, "eager_one_f_one_b": 1, "interleaved": 2, "zb_h1": 1, "zb_v": 2,
    "dual_pipe_v": 2, "stp": 2, "folded": 2, "eager_folded": 2,
}  # fmt: skip


def made(schedule: str, stages: Any, count: int, loss: Any = loss_of, **options: Any) -> Any:
    return PipelineSchedule(stages, count, loss, schedule=schedule, config=QUICK, **options)


def every_schedule(count: int) -> None:
    with gloo_group(60):
        batch = data(count)
        for name, chunks in SCHEDULES.items():
            total = chunks * dist.get_world_size()
            twins = mlps(total)
            losses, outputs = eager(in_order(twins), loss_of, pairs(batch, count))
            own = own_stages(mlps(total), name)
            schedule = made(name, own, count)
            found, found_losses = call(schedule, batch)
            assert compare(own, twins)
            if own[-1].is_last:
                close(found, torch.cat(outputs))
                close(torch.stack(found_losses), torch.stack(losses))
            else:
                assert found is None


@pytest.mark.parametrize(("ranks", "count"), [(2, 5), (4, 8)])
def test_every_schedule(ranks: int, count: int) -> None:
    run_ranks("test_pipelining:every_schedule", ranks, args=[count], timeout_s=100)
