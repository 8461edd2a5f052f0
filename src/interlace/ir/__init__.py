"""The shared vocabulary: frozen dataclasses, standard library only.

graph.py           what one rank must compute
plan.py            in which order it issues that
actions.py         what one rank runs in a step: strands on micro-batches, action by action
phase_numbers.py   actions of a schedule by number of their phase
stage_messages.py  what chunks on different ranks send each other, and which chunk reads which
phases.py          the graph that each phase of a schedule runs
chunk_graphs.py    a walk of a model as graphs of its chunks
weave.py           strands that work in the same memory, joined
costs.py           how long each part takes, alone and beside others
noise.py           which measured times are not to be trusted
timeline.py        what happened, or would happen, when; its steady state
interval_sets.py   sets of moments: their union, what two have in common, and how long they are
store.py           all of these as JSON files, read strictly
"""
