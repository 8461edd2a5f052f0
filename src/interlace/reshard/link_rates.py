"""Which ranks share a host, and how fast they reach each other."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations

import torch

from interlace.hardware.topology import Topology
from interlace.reshard.wire import Wire

ASSUMED = Topology(
    hosts=(),
    inter_host_bytes_per_s=12.5e9,
    intra_host_bytes_per_s=100e9,
    latency_ns=20_000,
)
"""100 Gbit/s and NVLink-like rates: where nothing is given or measured, only their ratio counts."""

_INTRA, _INTER = "intra", "inter"
_PROBE_BYTES = 8 << 20
_PROBES = 4


def host_name() -> str:
    """Names this rank's host; containers of one launcher are told apart by their node rank."""
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"


def measured_rates(
    topology: Topology,
    rank: int,
    wire: Wire,
    device: torch.device,
    share: Callable[[Mapping[str, float]], Mapping[int, Mapping[str, float]]],
) -> Topology:
    """`topology` with rates of two transfers of 8 MiB: between two hosts, and within one.

    All its ranks call this; `share` gathers what they say. A pair of devices measures the
    rate, so several ports of a host are not told apart.
    """
    pairs = _pairs(topology)
    found = {name: _probe(pair, rank, wire, device) for name, pair in pairs.items() if rank in pair}
    rates = {name: rate for said in share(found).values() for name, rate in said.items()}
    return replace(
        topology,
        inter_host_bytes_per_s=rates.get(_INTER, topology.inter_host_bytes_per_s),
        intra_host_bytes_per_s=rates.get(_INTRA, topology.intra_host_bytes_per_s),
    )


def _pairs(topology: Topology) -> dict[str, tuple[int, int]]:
    """Two ranks each to measure a rate with."""
    pairs = {}
    inside = [pair for host in topology.hosts for pair in combinations(host, 2)]
    if inside:
        pairs[_INTRA] = inside[0]
    if len(topology.hosts) > 1:
        pairs[_INTER] = (topology.hosts[0][0], topology.hosts[1][0])
    return pairs


def _probe(pair: tuple[int, int], rank: int, wire: Wire, device: torch.device) -> float:
    """Bytes per second of the fastest of a few transfers, each answered by one byte."""
    data = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    answer = torch.empty(1, dtype=torch.uint8, device=device)
    sender, receiver = pair
    best_s = float("inf")
    for _ in range(_PROBES):
        begin_s = time.perf_counter()
        if rank == sender:
            wire.send(data, receiver).wait()
            wire.receive(answer, receiver).wait()
        else:
            wire.receive(data, sender).wait()
            wire.send(answer, sender).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return _PROBE_BYTES / best_s
