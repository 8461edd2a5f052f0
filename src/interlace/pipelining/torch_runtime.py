"""Interlace's schedules on PyTorch's own pipeline runtime: the order is ours, the rest is theirs.

Passes of one action run one after the other there, so nothing is hidden under compute that PyTorch
does not hide itself. What is gained is the order: `folded`, `eager_folded`, `stp` and
`eager_one_f_one_b` are none of PyTorch's.
"""

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from interlace.errors import InputError
from interlace.graphs.torch_private import pipeline_runtime
from interlace.pipelining.chunk_numbers import found_for, refuse_other_stages
from interlace.schedules.finder import ScheduleFunction
from interlace.schedules.torch_csv import to_csv


def torch_schedule(
    stages: Any,
    n_microbatches: int,
    loss_fn: Callable[..., Any] | None = None,
    *,
    schedule: str | ScheduleFunction,
    **options: Any,
) -> Any:
    """A schedule of `torch.distributed.pipelining` that runs the order of ours called `schedule`.

    `stages` is the `PipelineStage` of this rank or a list of them; `options` go to PyTorch's
    schedule (`scale_grads`, `args_chunk_spec` and others). Use what is returned as
    `ScheduleDualPipeV`. Raises InputError if the schedule puts other stages on this rank, or cannot
    run so many micro-batches."""
    own: Sequence[Any] = stages if isinstance(stages, list) else [stages]
    if not own:
        raise InputError("there is no stage", hint="give the PipelineStage of this rank")
    ranks, rank = dist.get_world_size(own[0].group), dist.get_rank(own[0].group)
    found = found_for(schedule, ranks, own[0].num_stages)
    refuse_other_stages(found, [stage.stage_index for stage in own], ranks, rank)
    order = found.of_ranks(ranks, n_microbatches, own[0].num_stages // ranks)
    cells = csv.reader(io.StringIO(to_csv(order)))
    return pipeline_runtime(own, n_microbatches, loss_fn, cells, **options)
