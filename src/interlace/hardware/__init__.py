"""Descriptions of machines and clusters, and the times that follow from them. Torch-free.

`config` has a user's overrides (`hardware`, `link`), `measure.machine` the machine as it is.

cluster.py         a cluster as a file: devices, links, times of collectives
cluster_size.py    a cluster with the number of its devices: h100x512
topology.py        hosts and the ports that join them, for resharding
device_rates.py    what a class of GPU reaches of its data sheet in a long run
link_rates.py      classes of links: latencies of a hop, switches that reduce
operator_times.py  a matmul, attention and the rest by their shapes
collective_times.py  a collective by algorithm: ring, tree, switch, two levels, all to all
expert_job.py      experts of a job as numbers: how many, over how many ranks, how uneven
expert_times.py    what a layer of experts computes: router, rows in order, grouped matmuls
step_job.py        a job as numbers: parameters, multiplications
layer_times.py     forward and backward of a layer and of the head on one rank
step_model.py      a step: stages, bubble, gradients, optimizer; seconds and MFU
step_memory.py     peak memory of a rank: weights, gradients, optimizer, activations
devices.py         peak rates of GPUs by name
wire_bytes.py      bytes on the wire of a collective: the one formula
cluster_costs.py   a cost table of a rank of a cluster
computed_costs.py  a cost table computed for one rank and its link: roofline, alpha-beta
"""
