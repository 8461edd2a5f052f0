"""How a plain model is laid out over ranks: device meshes and DTensor plans.

meshes.py           device meshes and the names of their axes
tensor.py           tensor + sequence parallelism as a DTensor plan
tensor_layers.py    its layers that are not a DTensor style of PyTorch, and layers of experts
plans.py            the tensor-parallel plan that a `transformers` model publishes
split_values.py     where values are split over ranks under such a plan
local_parts.py      an unmodified module on this rank's part of its parameters
own_buffers.py      buffers of which each rank of an axis holds its own
context.py          context parallelism: ranks share each sequence
ring.py             ring attention: keys and values travel past all queries
ulysses.py          Ulysses: ranks trade the sequence for heads
block_attention.py  attention of a block of queries to a block of keys
in_graph.py         how a custom autograd function gets into a traced graph
expert.py           expert parallelism: the experts of a layer are dealt to ranks
published_experts.py  the expert-parallel plan that a `transformers` model publishes
data.py             which weights data-parallel ranks share, and in which buckets
bucket_shards.py    this rank's share of these
stage_shards.py     the same in a stage of a pipeline
fsdp_groups.py      how weights under `fully_shard` lie over data-parallel ranks
"""
