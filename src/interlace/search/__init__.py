"""Searches: a graph and costs in, an issue order out. Torch-free.

planner.py           a phase, or a whole step, planned by a search chosen by name; its head
problem.py           the problem that every search solves, and limits of memory
merge.py             best merge of main chains and fillers, then polish
chains.py            main chains and fillers of a graph
merge_chains.py      two chains merged by dynamic programming
list_scheduling.py   event-driven list scheduling
segment_pairs.py     the published baseline: segment pairs with barriers
optimal.py           proven optima of small problems
polish.py            an order improved by moving operators
contended.py         the same under contention, judged by the simulation
contended_length.py  how long an order takes under contention, fast
window.py            an order changed a window at a time
window_memory.py     its memory
evaluator.py         how long an order takes, fast
tight.py             orders for little memory
memory.py            peak memory of an order, counted from liveness
job_memory.py        bytes that a job keeps alive, by what was issued
bounds.py            times that no order of a phase can beat
step_bounds.py       a time that no order of a whole step can beat
pipelines/           pipelines made for one model: its cut, places and order
"""
