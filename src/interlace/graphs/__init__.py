"""From a module to executable graphs: trace, export to OpGraph, interleave, lower.

trace.py        module + example inputs -> ChunkGraphs (one forward, one backward graph)
accumulate.py   gradients of the backward graph flow into persistent buffers
export.py       fx graph -> OpGraph, the torch-free form that planners read
lower.py        graphs + a planned order -> one executable graph
torch_private.py  the only module that touches private torch APIs
"""
