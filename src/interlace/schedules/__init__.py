"""Schedules: in which order a rank runs the passes of its micro-batches, one file each.

A schedule is a function `(ranks, micro_batches, chunks) -> for each rank a tuple of actions`
(`ir.actions`), in a module of its own name. Everything else (executor, simulator, planner, memory,
report) reads actions.

one_strand.py  one micro-batch after the other
two_strand.py  the forward of each micro-batch beside the backward of the one before
folded.py      two chunks on a rank: front half forward beside back half backward
finder.py      from a name to a function, and from that to the actions and phases of a step
passes.py      what is added to a schedule: heads, graphs of the ends, work once a step
verify.py      proves that actions can run, in the order of micro-batches
"""
