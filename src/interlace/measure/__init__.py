"""Times measured on this machine, of which a cost table is made.

everything.py  the list of all that a full profile measures, in order; resumable
start_up.py    what a run measures when it starts: operators in a step, kinds that overlap
alone.py       every operator and collective of a step alone
pairs.py       two things at the same time
site_times.py  a site of a decomposed collective, whole and in slices
operands.py    operators with the real inputs that they had in one step
stopwatch.py   compute and collectives timed, alone and together
repeats.py     what repeats say: typical value, spread, whether to measure again
machine.py     what this machine is called, and how fast it is
cache.py       tables that later runs take
"""
