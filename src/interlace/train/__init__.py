"""A training run: session, loop, the ways to run a step, and what is written about it.

worker.py         one rank of a job, from the process group to the last line
session.py        one rank's model, data, weights, optimizer and runners
rank_job.py       what a run file comes to on one rank, checked and settled
opening.py        how a session is made from that
built_model.py    the module that a rank trains, laid out, with its loss
weights.py        master weights: what the optimizer owns
optimizer.py      AdamW with warm-up and decay, the norm of all gradients, and clipping by it
step_runners.py   two strands, one strand, eager: the ways to run a step, and what each gives
fully_sharded.py  PyTorch's `fully_shard` on the same module, to compare
loop.py           the loop, and what it writes
compare.py        the same first steps under each runner
gradient_check.py  one step against eager PyTorch, before training
fallback.py       whether the plan wins on the real machine
expert_load.py    how evenly tokens are dealt to experts
renewal.py        a plan made again when the load of experts drifts
same_run.py       what the ranks of a run must hold alike
checkpointer.py   when checkpoints are written, and which one is taken up
session_state.py  what a checkpoint holds of a session
recorded_steps.py  what is said of a recorded step: expected and measured, stage by stage
metrics.py        metrics.jsonl, and the numbers in it
model_flops.py    FLOPs of a token, for MFU
environment.py    environment, run file, costs and plan, written down
planning.py       `interlace plan`: a run planned without starting it
pipeline_command.py  the same of a pipeline
stage_plans.py    what its steps take, by every schedule: all ranks, simulated
searched_stages.py  a pipeline that is searched for the model
fake_depth.py     a deep model without weights, of which a few blocks are built
fake_trace.py     the graphs of one rank of a run, without ranks and weights
plan_output.py    what `interlace plan` says and writes
plan_costs.py     the times that it plans with: of a file, a cluster or a described machine
profiling.py      `interlace profile`: a run's operators measured, resumably
"""
