"""Times of collectives by algorithm: ring, tree, reducing switch, both levels, all to all, send.

    ring           latency of all steps + share sent / slowest rate around the ring
    tree           twice the depth of the tree + tensor x 2 / (rate x 0.78); all-reduce alone
    switch         the switch of a host adds (NVLS): one hop + tensor / rate of the switch
    two levels     switch inside the hosts, tree of hosts across (NVLS-tree): the slower of the two
    all to all     what stays in the host and what leaves it, side by side
    send           one message

Latencies, and the rates of protocols, are those of NCCL's own tuner (`link_rates`); the fastest
algorithm and protocol counts, as NCCL chooses. Ports of a host are shared by all of its devices
that send at the same time. `Cluster.collective_ns`, which plans are made with, is the plainer form
without a choice of algorithm.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.errors import InputError
from interlace.hardware.cluster import Cluster
from interlace.hardware.link_rates import LinkClass, link_class
from interlace.hardware.wire_bytes import share_sent
from interlace.ir.graph import Kind

PROTOCOLS = ("LL", "LL128", "Simple")
RING_BASE_US = (6.6, 14.0, 8.4)
"""A ring without a step, by protocol; a tree differs by less than the measurements."""
PROTOCOL_SHARE = (0.25, 0.65, 1.0)
"""Rate by protocol: LL sends a flag with each 4 bytes; LL128 as A100 nodes show."""
START_US = 12.0
"""Until the kernel of a collective runs on all ranks; nccl-tests of tiny tensors: 9 to 31."""
FILL_US = (0.0, 0.0, 25.0)
"""Simple fills buffers before the first byte arrives: least-squares fits of A100 nodes."""
TREE_SHARE = 0.78
"""NCCL's tuner: 0.92 of the ring, 0.85 of it across hosts."""
ALL_TO_ALL_SHARE = 0.86
"""Of the rate inside a host: 197 of 230 GB/s on 8 A100 (Galvatron's measurements)."""
PEER_US = 10.0
"""For each peer of an all-to-all: 65 us with 4 ranks, 104 with 8."""
SWITCH_RANKS = 5
"""From so many ranks NCCL lets the switch add; with fewer the ring is as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Where the ranks of a group lie."""

    ranks: int
    hosts: int
    local: int
    """Ranks of the group in one host, at most."""
    senders: int
    """Devices of a host that send to other hosts at the same time, of this group and others."""
    apart: int = 1
    """Devices from one rank of the group to the next."""

    def __post_init__(self) -> None:
        if not (0 < self.local <= self.ranks <= self.hosts * self.local):
            raise InputError(
                f"{self.ranks} ranks do not lie {self.local} to a host on {self.hosts} hosts",
                hint="ranks are at most hosts x local",
            )


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """The fastest way of one collective."""

    seconds: float
    algorithm: str
    protocol: str = "Simple"


def group_place(cluster: Cluster, ranks: Sequence[int], senders: int = 0) -> GroupPlace:
    """The place of a group of global `ranks`, which fill one host after the other.

    Without `senders` all devices of a host send at once, as with a mesh of equal groups. Raises
    InputError if the cluster has fewer devices.
    """
    cluster.require(max(ranks) + 1)
    per_host = Counter(rank // cluster.devices_per_host for rank in ranks)
    return GroupPlace(
        ranks=len(ranks),
        hosts=len(per_host),
        local=max(per_host.values()),
        senders=senders or cluster.devices_per_host,
    )


def axis_place(cluster: Cluster, size: int, stride: int, world: int) -> GroupPlace:
    """The place of a group of a mesh axis: `size` ranks, each `stride` after the one before."""
    if size * stride > world:
        raise InputError(
            f"{size} ranks in steps of {stride} do not fit in {world}", hint="check the mesh"
        )
    devices = min(cluster.devices_per_host, world)
    local = max(1, min(size, devices // stride))
    return GroupPlace(
        ranks=size,
        hosts=math.ceil(size / local),
        local=local,
        senders=max(local, devices),
        apart=stride,
    )


def across_bytes_per_s(cluster: Cluster, senders: int) -> float:
    """What one device sends to other hosts while `senders` of its host do."""
    total = cluster.inter_host.bytes_per_s * cluster.devices_per_host
    ports = cluster.ports_per_host or cluster.devices_per_host
    return min(total / ports, total / senders)


def collective_time(
    cluster: Cluster, kind: Kind, full_bytes: float, place: GroupPlace
) -> CollectiveTime:
    """The fastest algorithm for one collective, alone but for the other senders of its place.

    `full_bytes` is the whole tensor: gathered, before a scatter, or what one rank sends.
    """
    if place.ranks == 1:
        return CollectiveTime(0.0, "none")
    if kind is Kind.SEND:
        return CollectiveTime(_send_s(cluster, full_bytes, place), "send")
    if kind is Kind.ALL_TO_ALL:
        return CollectiveTime(_all_to_all_s(cluster, full_bytes, place), "all to all")
    ways = [
        CollectiveTime(_ring_s(cluster, kind, full_bytes, place, index), "ring", protocol)
        for index, protocol in enumerate(PROTOCOLS)
    ]
    if kind is Kind.ALL_REDUCE:
        ways += [
            CollectiveTime(_tree_s(cluster, full_bytes, place, index), "tree", protocol)
            for index, protocol in enumerate(PROTOCOLS)
        ]
        switch = _inside(cluster).switch_share
        if switch and place.local >= SWITCH_RANKS:
            name = "switch" if place.hosts == 1 else "two levels"
            ways.append(CollectiveTime(_switch_s(cluster, full_bytes, place), name))
    return min(ways, key=lambda way: way.seconds)


def _inside(cluster: Cluster) -> LinkClass:
    return link_class(cluster.intra_host.link, inside=True)


def _across(cluster: Cluster) -> LinkClass:
    return link_class(cluster.inter_host.link, inside=False)


def _around_bytes_per_s(cluster: Cluster, place: GroupPlace) -> float:
    """Rate at which one rank passes on what rings carry: each device that the group has in a host
    is the way out of one of them."""
    link = cluster.intra_host
    inside = link.bytes_per_s if place.local > 1 else math.inf
    if link.island and place.local > link.island:
        inside = min(inside, link.between_bytes_per_s)
    if place.hosts == 1:
        return inside
    return min(inside, place.local * across_bytes_per_s(cluster, place.senders))


def _ring_s(
    cluster: Cluster, kind: Kind, full_bytes: float, place: GroupPlace, protocol: int
) -> float:
    rounds = 2 if kind is Kind.ALL_REDUCE else 1
    network = rounds * (place.hosts - 1)
    inside = rounds * (place.ranks - 1) - network
    latency_us = (
        START_US
        + RING_BASE_US[protocol]
        + FILL_US[protocol]
        + inside * _inside(cluster).ring_hop_us[protocol]
        + network * _across(cluster).ring_hop_us[protocol]
    )
    rate = _around_bytes_per_s(cluster, place) * PROTOCOL_SHARE[protocol]
    return latency_us * 1e-6 + share_sent(kind, place.ranks) * full_bytes / rate


def _tree_s(cluster: Cluster, full_bytes: float, place: GroupPlace, protocol: int) -> float:
    latency_us = (
        START_US
        + RING_BASE_US[protocol]
        + FILL_US[protocol]
        + 2 * (place.local - 1) * _inside(cluster).tree_hop_us[protocol]
        + 2 * math.ceil(math.log2(place.hosts)) * _across(cluster).tree_hop_us[protocol]
    )
    rate = _around_bytes_per_s(cluster, place) * PROTOCOL_SHARE[protocol] * TREE_SHARE
    return latency_us * 1e-6 + 2 * full_bytes / rate


def _switch_s(cluster: Cluster, full_bytes: float, place: GroupPlace) -> float:
    """One host: the switch adds. Several: each device takes its part of the tensor to the other
    hosts, in pieces, so that the slower of the two levels counts."""
    rate = cluster.intra_host.gb_per_s * 1e9 * _inside(cluster).switch_share
    inside_s = full_bytes / rate
    if place.hosts == 1:
        return (START_US + 25.0) * 1e-6 + inside_s
    shares = share_sent(Kind.ALL_REDUCE, place.hosts) * full_bytes / place.local
    across_s = shares / across_bytes_per_s(cluster, place.senders)
    hops_us = 2 * math.ceil(math.log2(place.hosts)) * 20.9
    return (START_US + 25.0 + hops_us) * 1e-6 + max(inside_s, across_s)


def _all_to_all_s(cluster: Cluster, full_bytes: float, place: GroupPlace) -> float:
    piece = full_bytes / place.ranks
    inside = piece * (place.local - 1)
    inside_s = inside / (cluster.intra_host.bytes_per_s * ALL_TO_ALL_SHARE)
    outside = piece * (place.ranks - place.local)
    outside_s = outside / across_bytes_per_s(cluster, place.senders)
    farthest = _across(cluster) if place.hosts > 1 else _inside(cluster)
    latency_us = START_US + farthest.send_us + PEER_US * (place.ranks - 1)
    return latency_us * 1e-6 + max(inside_s, outside_s)


def _send_s(cluster: Cluster, full_bytes: float, place: GroupPlace) -> float:
    link = cluster.intra_host
    if place.hosts == 1:
        rate = link.bytes_per_s
        if link.island and place.apart >= link.island:  # all devices of an island send at once
            rate = min(rate, link.between_bytes_per_s / link.island)
        return _inside(cluster).send_us * 1e-6 + full_bytes / rate
    rate = across_bytes_per_s(cluster, place.senders)
    return _across(cluster).send_us * 1e-6 + full_bytes / rate
