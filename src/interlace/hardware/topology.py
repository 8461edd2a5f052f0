"""Where ranks are and how fast they reach each other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.errors import InputError
from interlace.hardware.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Hosts joined by full-duplex network ports; inside a host each device has a full-duplex link.

    Device i of n on a host uses port `i * nics_per_host // n`.
    """

    hosts: tuple[tuple[int, ...], ...]
    """Ranks of each host, every rank once."""
    inter_host_bytes_per_s: float
    """Rate of one network port in one direction."""
    intra_host_bytes_per_s: float
    """Rate of one device's link to the others of its host, in one direction."""
    nics_per_host: int = 1
    """Network ports of one host."""
    latency_ns: int = 0
    """From a message's last byte sent to its receiver being able to forward it."""

    def __post_init__(self) -> None:
        ranks = [rank for host in self.hosts for rank in host]
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if self._repeats() else []
        if twice:
            raise InputError(
                f"rank {twice[0]} is on more than one host", hint="name every rank once"
            )
        for name in ("inter_host_bytes_per_s", "intra_host_bytes_per_s"):
            rate = getattr(self, name)
            if not (math.isfinite(rate) and rate > 0):
                raise InputError(f"{name} = {rate!r}", hint=f"set {name} above 0")
        if self.nics_per_host < 1:
            raise InputError(
                f"nics_per_host = {self.nics_per_host}", hint="a host has at least one port"
            )
        if self.latency_ns < 0:
            raise InputError(f"latency_ns = {self.latency_ns}", hint="set 0 or more")

    def _repeats(self) -> bool:
        return len(set().union(*self.hosts)) < sum(map(len, self.hosts))

    def host_of(self) -> dict[int, int]:
        """The host of every rank."""
        return {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}

    def nic_of(self) -> dict[int, int]:
        """The network port of every rank, numbered through all hosts."""
        return {
            rank: host * self.nics_per_host + i * self.nics_per_host // len(ranks)
            for host, ranks in enumerate(self.hosts)
            for i, rank in enumerate(ranks)
        }


def host_groups(host_of: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
    """Ranks by host, in the order of the lowest rank."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(host_of):
        hosts.setdefault(host_of[rank], []).append(rank)
    return tuple(map(tuple, hosts.values()))


def cluster_topology(cluster: Cluster, ranks: Sequence[int]) -> Topology:
    """The ranks on a cluster, whose ranks fill one host after the other; a port per device.

    Raises InputError if there are not so many.
    """
    cluster.require(max(ranks, default=-1) + 1)
    places = {rank: str(rank // cluster.devices_per_host) for rank in ranks}
    return Topology(
        hosts=host_groups(places),
        nics_per_host=cluster.devices_per_host,
        inter_host_bytes_per_s=cluster.inter_host.bytes_per_s,
        intra_host_bytes_per_s=cluster.intra_host.bytes_per_s,
        latency_ns=round(cluster.inter_host.step_latency_us * 1e3),
    )
