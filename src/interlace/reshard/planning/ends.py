"""The resources that a message occupies: one sending and one receiving end, busy together.

Between hosts these are the ports of the two devices, one end per direction; inside a host the
devices' links. Ends are numbered so that arrays can hold what is known of them.
"""

from collections.abc import Sequence
from math import ceil, floor

from interlace.hardware.topology import Topology


class Links:
    """Ends and times of messages on one topology."""

    def __init__(self, topology: Topology) -> None:
        self.host = topology.host_of()
        self.nic = topology.nic_of()
        self.nics = len(topology.hosts) * topology.nics_per_host
        self.device = {rank: i for i, rank in enumerate(self.host)}
        self.ends = 2 * (self.nics + len(self.device))
        self.latency_ns = topology.latency_ns
        self._inter = 1e9 / topology.inter_host_bytes_per_s
        self._intra = 1e9 / topology.intra_host_bytes_per_s
        self.inside_share = self._intra / self._inter
        """Time of a message inside a host against the same between hosts."""

    def ends_of(self, sender: int, receiver: int) -> tuple[int, int]:
        """The sending end and the receiving end."""
        if self.host[sender] != self.host[receiver]:
            return self.nic[sender], self.nics + self.nic[receiver]
        first = 2 * self.nics
        return (
            first + self.device[sender],
            first + len(self.device) + self.device[receiver],
        )

    def time_ns(self, sender: int, receiver: int, size_bytes: int) -> int:
        """How long a message occupies both ends."""
        crosses = self.host[sender] != self.host[receiver]
        return ceil(size_bytes * (self._inter if crosses else self._intra))

    def by_host(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        """Ranks of each host, hosts in the order of their first rank."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.host[rank], []).append(rank)
        return found

    def port_ns(self, size_bytes: int) -> int:
        """How long these bytes take on one port."""
        return floor(size_bytes * self._inter)
