"""Descriptions of machines and clusters, and the times that follow from them. Torch-free.

`config` has a user's overrides (`hardware`, `link`), `measure.machine` the machine as it is.

cluster.py         a cluster as a file: devices, links, times of collectives
topology.py        hosts and the ports that join them, for resharding
devices.py         peak rates of GPUs by name
wire_bytes.py      bytes on the wire of a collective: the one formula
cluster_costs.py   a cost table of a rank of a cluster
computed_costs.py  a cost table computed for one rank and its link: roofline, alpha-beta
"""
