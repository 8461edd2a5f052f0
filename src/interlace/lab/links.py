"""A slow link emulated in user space: real gloo collectives that finish as late as on that link.

    backend = emulated_backend(parse_rate("250mbit", "--link.rate"), latency_us=50.0)
    dist.init_process_group(backend=backend, ...)      # everything made from it is emulated too

Each process group is one link. An operation occupies its group's link for latency + wire bytes /
rate, in issue order, and completes when that time has passed *and* gloo has finished:

    end = max(gloo end, max(issue, link free) + latency + wire bytes / rate);   link free = end

A receive occupies the inbound side from the moment its data has arrived through gloo, because
only the sender knows when it was sent. Two differences to a real link: a rank cannot see when its
peers issued a collective, so one that is early by d may finish up to d too soon; and latency is
not overlapped with the operation before, so many small operations in a row take longer.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from interlace.config import LinkConfig
from interlace.errors import InputError
from interlace.hardware.wire_bytes import wire_bytes
from interlace.ir.graph import Kind
from interlace.lab.link_work import EmulatedLink, EmulatedWork

_CPU = torch.device("cpu")
"""Device type that the emulated backend serves."""


def emulated_backend(rate_bits: int, latency_us: float) -> str:
    """Name of a torch.distributed CPU backend with links of `rate_bits` bit/s, `latency_us` us.

    The first call for a pair registers it with torch, later calls return the same name.
    """
    describe(rate_bits, latency_us)
    name = f"emulated-{rate_bits}-{float(latency_us)}"
    if name not in dist.Backend.backend_list:

        def create(
            store: dist.Store, rank: int, size: int, timeout: timedelta
        ) -> "EmulatedProcessGroup":
            link = EmulatedLink(rate_bits=rate_bits, latency_us=latency_us)
            return EmulatedProcessGroup(store, rank, size, timeout, link)

        dist.Backend.register_backend(name, create, devices=["cpu"])
    return name


def describe(rate_bits: int, latency_us: float) -> str:
    """Label for reports, such as `emulated link 250 Mbit/s, 50 us`."""
    if not 0 < rate_bits < float("inf"):
        raise InputError(
            f"an emulated link of {rate_bits!r} bit/s carries nothing",
            hint="set link.rate to a positive rate such as 250mbit",
        )
    if not 0 <= latency_us < float("inf"):
        raise InputError(
            f"link.latency_us = {latency_us!r} is not a time",
            hint="set link.latency_us to 0 or more microseconds",
        )
    for unit, bits in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate_bits >= bits:
            return f"emulated link {rate_bits / bits:g} {unit}, {latency_us:g} us"
    return f"emulated link {rate_bits:g} bit/s, {latency_us:g} us"


def _bytes(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(each) for each in tensors)


# Wire bytes of one rank, from the group and the arguments of the call: those of ring algorithms.


def _all_reduce_bytes(group: dist.ProcessGroup, tensors: Any, *_: Any) -> float:
    return wire_bytes(Kind.ALL_REDUCE, _bytes(tensors), group.size())


def _all_gather_bytes(group: dist.ProcessGroup, _outputs: Any, inputs: Any, *_: Any) -> float:
    return wire_bytes(Kind.ALL_GATHER, group.size() * _bytes(inputs), group.size())


def _reduce_scatter_bytes(group: dist.ProcessGroup, _outputs: Any, inputs: Any, *_: Any) -> float:
    return wire_bytes(Kind.REDUCE_SCATTER, _bytes(inputs), group.size())


def _all_to_all_bytes(group: dist.ProcessGroup, outputs: Any, inputs: Any, *_: Any) -> float:
    """The busier direction of an exchange of lists bounds it."""
    return max(_bytes(each) - _bytes(each[group.rank()]) for each in (outputs, inputs))


def _all_to_all_single_bytes(
    group: dist.ProcessGroup,
    output: Any,
    input_: Any,
    output_splits: Any,
    input_splits: Any,
    *_: Any,
) -> float:
    """As `_all_to_all_bytes`; splits are rows per rank, and no splits mean equal ones."""

    def crossing(tensor: torch.Tensor, splits: Sequence[int]) -> float:
        own = splits[group.rank()] / max(sum(splits), 1) if splits else 1 / group.size()
        return _bytes(tensor) * (1 - own)

    return max(crossing(output, output_splits), crossing(input_, input_splits))


def _whole_bytes(_group: dist.ProcessGroup, tensors: Any, *_: Any) -> float:
    return _bytes(tensors)


def _gather_bytes(group: dist.ProcessGroup, outputs: Any, inputs: Any, *_: Any) -> float:
    """Only the root has outputs; its link carries every other rank's part."""
    return _bytes(inputs) * (group.size() - 1 if outputs else 1)


def _scatter_bytes(group: dist.ProcessGroup, outputs: Any, inputs: Any, *_: Any) -> float:
    """Only the root has inputs; its link carries every other rank's part."""
    return _bytes(outputs) * (group.size() - 1 if inputs else 1)


def _no_bytes(_group: dist.ProcessGroup, *_: Any) -> float:
    return 0


def _collective(
    name: str, bytes_of: Callable[..., float], *, old_name: str = ""
) -> Callable[..., dist.Work]:
    """A method that runs gloo's `name` (torch 2.11: `old_name`) behind the link.

    Options and split sizes go to gloo as torch passed them, by position or by name.
    """
    inner_name = name if hasattr(dist.ProcessGroup, name) else old_name

    def method(self: "EmulatedProcessGroup", *args: Any, **kwargs: Any) -> dist.Work:
        end_ns = self.link.send(bytes_of(self, *args))
        inner = getattr(self.gloo, inner_name)(*args, **kwargs)
        outputs = args[0] if args else []
        if not isinstance(outputs, list):
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else []  # none of a barrier
        work = EmulatedWork(inner, self.link, outputs)
        work.follow_in_turn(end_ns)
        return work

    return method


class EmulatedProcessGroup(dist.ProcessGroup):
    """A gloo process group behind one `EmulatedLink`.

    Wire bytes per rank are those of `hardware.wire_bytes`. A reduce counts as a broadcast, and the
    root of a gather or scatter carries n-1 parts.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, link: EmulatedLink
    ) -> None:
        # torch makes a group that calls Python back only by this signature, missing in its stubs.
        super().__init__(rank, size)  # pyrefly: ignore
        self.link = link
        self._store = store
        self.gloo = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        # Registered on this group too, because torch asks it for its devices and its name.
        for group in (self.gloo, self):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, backend)

    allreduce = _collective("allreduce", _all_reduce_bytes)
    allreduce_coalesced = _collective("allreduce_coalesced", _all_reduce_bytes)
    allgather = _collective("allgather", _all_gather_bytes)
    allgather_coalesced = _collective("allgather_coalesced", _all_gather_bytes)
    all_gather_single = _collective(
        "all_gather_single", _all_gather_bytes, old_name="_allgather_base"
    )
    all_gather_single_coalesced = _collective(
        "all_gather_single_coalesced",
        _all_gather_bytes,
        old_name="allgather_into_tensor_coalesced",
    )
    reduce_scatter = _collective("reduce_scatter", _reduce_scatter_bytes)
    reduce_scatter_single = _collective(
        "reduce_scatter_single",
        _reduce_scatter_bytes,
        old_name="_reduce_scatter_base",
    )
    reduce_scatter_single_coalesced = _collective(
        "reduce_scatter_single_coalesced",
        _reduce_scatter_bytes,
        old_name="reduce_scatter_tensor_coalesced",
    )
    alltoall = _collective("alltoall", _all_to_all_bytes)
    all_to_all_single = _collective(
        "all_to_all_single", _all_to_all_single_bytes, old_name="alltoall_base"
    )
    broadcast = _collective("broadcast", _whole_bytes)
    reduce = _collective("reduce", _whole_bytes)
    gather = _collective("gather", _gather_bytes)
    scatter = _collective("scatter", _scatter_bytes)
    barrier = _collective("barrier", _no_bytes)

    # Names by which torch 2.11 calls the same operations.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def get_group_store(self) -> dist.Store:
        """The store that its ranks met at."""
        return self._store

    def send(self, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> dist.Work:
        """Occupies the outbound side; gloo takes the receiver and the tag."""
        end_ns = self.link.send(_bytes(tensors))
        work = EmulatedWork(self.gloo.send(tensors, *args, **kwargs), self.link, tensors)
        work.follow_alone(lambda: end_ns)
        return work

    def recv(self, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> dist.Work:
        """Occupies the inbound side once the data is there; gloo takes sender and tag."""
        return self._receive(self.gloo.recv(tensors, *args, **kwargs), tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> dist.Work:
        """As `recv`, from whoever sends first; `_source_rank` of the work tells who."""
        return self._receive(self.gloo.recv_anysource(tensors, *args, **kwargs), tensors)

    def _receive(self, inner: dist.Work, tensors: list[torch.Tensor]) -> dist.Work:
        work = EmulatedWork(inner, self.link, tensors)
        work.follow_alone(lambda: self.link.receive(_bytes(tensors)))
        return work


def link_label(link: LinkConfig) -> str:
    """How the ranks are joined, for reports and for the name of a machine."""
    if (rate := link.bits_per_s) is not None:
        return describe(rate, link.latency_us)
    lab_rate = os.environ.get("INTERLACE_LAB_RATE")
    return f"lab link {lab_rate}" if lab_rate else "real link"
