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

overlap.py             Interlace's interleaving inside PyTorch's runtime: two passes of an action
overlap_checks.py      what PyTorch's schedule and stages must be like, and what is refused
overlap_step.py        a step there: what passes take from the stages, and leave in them
overlap_values.py      what a stage is called with, as the inputs of its graphs
overlap_run.py         the values of each stage and micro-batch while graphs run
overlap_costs.py       times of operators of stages that differ from rank to rank
traced_stage.py        one stage by itself as graphs of forward and backward
"""

from interlace.pipelining.overlap import Overlap, install_overlap
from interlace.pipelining.pipeline_schedule import PipelineSchedule
from interlace.pipelining.torch_runtime import torch_schedule

__all__ = ["Overlap", "PipelineSchedule", "install_overlap", "torch_schedule"]
