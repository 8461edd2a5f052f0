"""Decomposed collectives as a pass over traced graphs.

apply.py          the pass: find sites, choose, rewrite, list; all-gather + matmuls
find.py           collectives that matmuls next to them can hide
sends.py          the sends of a decomposed collective, in CommFuse's order
scatter.py        matmuls + reduce-scatter, or all-reduce
query_split.py    attention + projection + reduce-scatter
expert_groups.py  rows to experts and back, by groups of experts
slicing.py        data slicing, the published baseline
"""
