"""Mixture-of-experts layers as operators of traced graphs (dropless: MegaBlocks, arXiv 2211.15841).

How many tokens an expert gets is known at run time only, and a traced graph holds fixed sizes. So
what depends on the routing is done by operators of our own, registered with `torch.library`, of
which a tracer sees a *nominal* shape: the rows that balanced routing would give. The tensors that
run through the graph have exactly the rows that arrived, and no padding. `graphs.ragged` refuses
operators between them that would look at the number of rows.

Letters: N tokens, K experts per token, D width, F inner width, E experts, R ranks that share them,
L = E / R experts of a rank. Rows on the side of the *tokens* are sorted by expert; rows on the
side of the *experts* by this rank's expert, and then by the rank that they came from.

rows_by_expert.py  rows of tokens sorted by expert, and back
between_ranks.py   rows to the ranks of their experts, and back; the counts that say how many
merged_sends.py    one copy of a token for each rank that has experts of it
pieces.py          rows of some experts of each rank, and together again
grouped.py         one matmul for each expert, on the rows that it got
"""
