"""Interlace behind the interface of `torch.distributed.pipelining`, both ways.

    schedule = PipelineSchedule(stages, n_microbatches, loss_fn, schedule="dual_pipe_v")
    schedule.step(tokens)                                  # on the rank of the first stage
    schedule.step(target=targets, losses=losses)           # on the rank of the last one

pipeline_schedule.py   PyTorch's stages on Interlace's runtime, behind PyTorch's calls
torch_runtime.py       Interlace's orders on PyTorch's runtime
stage_chain.py         the stages of all ranks as one module, and whose input is whose
chunk_numbers.py       which stages a schedule puts on which rank
chain_step.py          the step behind a schedule: all stages as one model, cut between them
stage_exchange.py      modules and descriptions of inputs on their way between ranks
"""

from interlace.pipelining.pipeline_schedule import PipelineSchedule
from interlace.pipelining.torch_runtime import torch_schedule

__all__ = ["PipelineSchedule", "torch_schedule"]
