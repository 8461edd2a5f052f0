"""Schedules: in which order a rank runs the passes of its micro-batches, one file each.

A schedule is a function `(ranks, micro_batches, chunks) -> for each rank a tuple of actions`
(`ir.actions`), in a module of its own name. Everything else (executor, simulator, planner, memory,
report) reads actions.

    one_strand  one micro-batch after the other
    two_strand  the forward of each micro-batch beside the backward of the one before
    folded      two chunks on a rank: front half forward beside back half backward
    finder      from a name to a function, and from a function to the actions and phases of a step
    passes      what is added to a schedule's actions: heads, graphs of the ends, once-a-step work
    verify      proves that actions can run, and in the order of micro-batches
"""
