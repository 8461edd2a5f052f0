"""Simulation: what a plan would do, as the Timeline type that real runs give too.

lanes.py            one rank's issue order on a compute lane and link queues
simulated_step.py   a whole step, with nothing emptied between phases
expected_step.py    its mean length, where times vary as measured
pipeline_costs.py   what passes and messages of a pipeline cost
listed_actions.py   when its actions run, as numbers
pipeline_step.py    all ranks of a pipeline, action by action, with their messages
dealt_step.py       the same with measured times of passes, dealt anew
decomposed.py       a collective and its matmul: in turn, sliced, decomposed
"""
