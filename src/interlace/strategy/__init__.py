"""How a job is split over the ranks of a cluster: simulated from shapes, and searched. Torch-free.

job_layout.py       a run file as a layout and a job; what is refused
job_links.py        collectives of a layout on a cluster: lanes, times, contention
timed_graph.py      operators with times, written down one after the other
context_operators.py  what ranks of a sequence exchange around attention
expert_operators.py  layers of experts: rows to their ranks and back
tensor_operators.py  exchanges of tensor ranks with the matmuls next to them
decomposed_operators.py  those cut into steps under a part of the matmul
layer_operators.py  operators of layers as graphs with times
pass_times.py       times of passes, alone and side by side, by simulation
chunk_cuts.py       where chunks of a model begin
rank_memory.py      peak memory of a rank by what holds it
step_ends.py        what a rank does once a step: gathers, reductions, the optimizer
simulated_job.py    a step of all ranks that differ
varied_step.py      its time where passes vary, or one device is slow
expected_error.py   how far off that may be
schedule_facts.py   what the schedule of a layout does, from its actions
layout_space.py     all layouts that a run file may have on so many devices
lower_bounds.py     times and memory that no simulation of a layout goes below
layout_order.py     layouts by their bounds, as far as a search asks for them
steady_step.py      a long step from two shorter ones
layout_search.py    the best layouts: bounds for all, simulation for the best few
goodput.py          what failures and checkpoints leave of a job's time
search_cache.py     searches kept on disk by what went into them
contributions.py    what each technique of a layout gives
"""
