"""Schedules: in which order a rank runs the passes of its micro-batches, one file each.

A schedule is a function `(ranks, micro_batches, chunks) -> for each rank a tuple of actions`
(`ir.actions`), in a module of its own name. Everything else (executor, simulator, planner, memory,
report) reads actions.

one_strand.py         one micro-batch after the other
two_strand.py         the forward of each micro-batch beside the backward of the one before
gpipe.py              all forwards, then all backwards
one_f_one_b.py        1F1B: a backward as soon as its gradient is there
eager_one_f_one_b.py  the same with more forwards ahead, so that transfers are hidden
interleaved.py        1F1B with several chunks on a rank
zb_h1.py              zero bubble: 1F1B with backwards cut in two
zb_h2.py              the same with more forwards ahead, so that no rank waits
zb_v.py               zero bubble: a folded model with backwards cut in two
folded.py             the W shape: front half forward beside back half backward
eager_folded.py       the same with more ahead, so that transfers are hidden
dual_pipe_v.py        a folded model with cut backwards at the ends
stp.py                the same, with a forward beside the backward of the same chunk
rank_writer.py        what such files are written with
declared.py           what a schedule says of itself beside its actions
listed.py             schedules that are lists, from a file or a search
finder.py             from a name and its options to a function, to actions and to phases
stage.py              a schedule as one rank of a pipeline runs it
passes.py             what is added to a schedule: heads, graphs of the ends, work once a step
verify.py             proves that actions can run, in the order of micro-batches
sends_receives.py     what ranks send and receive, and a proof that none waits for ever
schedule_text.py      schedules as text that reads back
torch_csv.py          schedules in the CSV form of torch, both ways
grid.py               draws a schedule
"""
