"""Pipelines made for one model: where it is cut, which rank has which chunk and in which order they
run, chosen together by simulation within a limit of memory. Torch-free.

model_units.py     what is given: the parts of a model with their costs, and a pipeline
units_file.py      them from a TOML file
chunk_layouts.py   cuts of a model into chunks, and chunks on ranks
step_clock.py      how long lists of passes take, fast, and what memory they need
greedy_orders.py   lists of passes by rules, as an event loop makes them
fixed_orders.py    lists of the schedules of `schedules/`, with their own chunks on ranks
climbing.py        a layout and rules improved step by step
swaps.py           lists improved by moving passes, a few hundred times
annealing.py       lists improved by a million changes, where numba is installed
annealing_kernel.py  its loop, compiled by numba
step_floor.py      a time that no pipeline of a model can beat
pipeline_search.py  the search as a whole, and what it found
"""
