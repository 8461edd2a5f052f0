"""Measured claims, one file each, found by name: `interlace bench NAME`.

A bench runs baseline and ours interleaved in one run and reports rows
{"case", "metric", "ours", "baseline", "ratio", "spread": [min, max]}.

strands.py             two strands by each search against one strand and eager, by link rate
strand_rows.py         its rows and tables, which `zero3` shares
zero3.py               ZeRO-3 under two strands against `fully_shard`
graphs.py              traced graphs against eager PyTorch, with no communication at all
checks.py              what it costs a step to check that the module is still the same
imagined.py            two strands on one device as a rank of an imagined cluster
decompose.py           decomposed collectives against plain ones and data slicing
decompose_shapes.py    its blocks and ways, as names and sizes
decompose_blocks.py    its MLP and attention blocks, by every way to communicate
decompose_emulated.py  its matmuls and attention that take a given time
decompose_job.py       its program: one rank that runs blocks by all ways, in turns
decompose_train.py     its training runs, decomposed or with two strands or both
decompose_rows.py      its rows and tables
reshard.py             tensors moved between meshes, by the paper's methods, PyTorch and ours
reshard_cases.py       its cases, from the paper and our own
reshard_rivals.py      what a user of plain PyTorch does today
reshard_world.py       its program: one rank on hosts of a lab
reshard_rows.py        its rows and tables
reshard_picture.py     its picture: effective bandwidth by case and method
pipeline.py            schedules of pipelines on our runtime and on that of PyTorch
pipeline_world.py      its program: one rank that runs steps by all ways, in turns
pipeline_rivals.py     a step on PyTorch's own pipeline runtime
searched.py            a pipeline searched for an uneven model, against interleaved 1F1B
searched_model.py      its model as units, and what they take
searched_world.py      its program: one rank that runs steps by all ways, in turns
tensor_share.py        the W shape with two strands against 1F1B, by share of communication
tensor_share_world.py  its program: one rank that runs steps by all ways, in turns
stage_transfers.py       two stages on two hosts, each in its own layout, by the paper's methods
stage_transfers_cases.py   its cases, and the paper's shares of communication
stage_transfers_models.py  its models, in the layout of a rank's stage
stage_transfers_search.py  the order that is searched from what chunks took
stage_transfers_links.py   its ways that wait for every transfer, or transfer next to nothing
stage_transfers_world.py   its program: one rank that runs steps by all ways, in turns
moe_strands.py         experts under two strands against eager and the order fixed by hand
moe_model.py           its model, and how experts are drawn
moe_rivals.py          its experts as a user of plain PyTorch writes them
moe_order.py           its order fixed by hand, as a plan
moe_world.py           its program: one rank that runs steps by all ways, in turns
simulator.py           published training steps against the step model
simulator_rows.py      its rows, as jobs on clusters, or why one is left out
simulator_jobs.py      rows that only the simulation of layouts describes
simulator_recipes.py   rows of NVIDIA's recipes for NeMo, all of them simulated
simulator_scores.py    its scores, and two numbers fitted to a third of the rows
simulator_peers.py     what other simulators said of the same rows
simulator_lab.py       what our own benches predicted of their steps, as recorded
simulator_decomposed.py  CommFuse's layer with decomposed collectives, against a simulated one
simulator_strands.py   DHelix's factors of two strands over one, against simulated ones
results.py             the form of every result: rows, environment, table, JSON file
"""
