"""Classes of links: what a hop takes by NCCL's protocols, and whether a switch can reduce.

A cluster file names the class of both links (`link = "nvlink4"`). Rates and the efficiency are the
file's, since hosts differ; what a hop takes is a property of the technology and of NCCL. The
latencies of NVLink and networks are those of NCCL's own tuner (`src/graph/tuning.cc`), in
microseconds per hop for the protocols LL, LL128 and Simple. Those of PCIe, Ethernet and EFA, and of
single messages, are round figures without a source.
"""

from dataclasses import dataclass

from interlace.errors import InputError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """What does not depend on the host."""

    ring_hop_us: tuple[float, float, float]
    """One step of a ring by protocol: LL, LL128, Simple."""
    tree_hop_us: tuple[float, float, float]
    """One level of a tree."""
    send_us: float
    """A message without data, from one device to another."""
    switch_share: float = 0.0
    """Share of the data sheet at which the switch reduces a tensor (NVLS); 0: it cannot."""


_PCIE = LinkClass(ring_hop_us=(1.0, 2.5, 5.7), tree_hop_us=(1.0, 1.9, 4.0), send_us=15.0)
_NVLINK = LinkClass(ring_hop_us=(0.6, 1.9, 3.4), tree_hop_us=(0.6, 1.25, 4.0), send_us=10.0)
_NETWORK = LinkClass(ring_hop_us=(2.7, 4.0, 14.0), tree_hop_us=(5.0, 8.5, 14.0), send_us=20.0)
_SLOW_NETWORK = LinkClass(
    ring_hop_us=(25.0, 25.0, 40.0), tree_hop_us=(25.0, 25.0, 40.0), send_us=40.0
)

LINKS: dict[str, LinkClass] = {
    "pcie": _PCIE,
    "nvlink2": _NVLINK,
    "nvlink3": _NVLINK,
    # 8 H200: an all-reduce of 8 GiB by NVLS in 31 ms, which is 0.61 of 450 GB/s.
    "nvlink4": LinkClass(
        ring_hop_us=_NVLINK.ring_hop_us,
        tree_hop_us=_NVLINK.tree_hop_us,
        send_us=_NVLINK.send_us,
        switch_share=0.61,
    ),
    # 8 B200: one of 16 GiB in 35.6 ms, which is 0.535 of 900 GB/s.
    "nvlink5": LinkClass(
        ring_hop_us=_NVLINK.ring_hop_us,
        tree_hop_us=_NVLINK.tree_hop_us,
        send_us=_NVLINK.send_us,
        switch_share=0.535,
    ),
    "memory": _PCIE,
    "infiniband": _NETWORK,
    "roce": _NETWORK,
    "omni-path": _NETWORK,
    "slingshot": _NETWORK,
    "efa": _SLOW_NETWORK,
    "ethernet": _SLOW_NETWORK,
}
"""By name. `memory` joins processes of one machine without GPUs."""


def link_class(name: str, *, inside: bool) -> LinkClass:
    """The class of that name; without a name NVLink without reducing switches `inside` a host, and
    InfiniBand between hosts. Raises InputError if there is none."""
    if not name:
        return _NVLINK if inside else _NETWORK
    if name not in LINKS:
        raise InputError(f"link = {name!r} is no class of link", hint=nearest(name, LINKS))
    return LINKS[name]
