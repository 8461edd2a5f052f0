"""Decomposed collectives as functions on plain tensors and process groups, with autograd.

loops.py              the two loops that all share: gather slices, scatter slices
exchange.py           point-to-point transfers of one call: started in batches, waited for by key
arguments.py          what the functions accept; anything else is refused
column_parallel.py    all-gather, then matmuls
row_parallel.py       matmul, then reduce-scatter or all-reduce
weight_gradient.py    weight gradients in parts: as filler, summed up, or reduce-scattered
attention_scatter.py  attention, output projection and reduce-scatter as one
ulysses_overlap.py    all-to-alls around attention, under the attention
sliced_matmul.py      data slicing, the published baseline
"""
