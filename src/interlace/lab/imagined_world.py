"""One process as rank 0 of an imagined cluster: real kernels, modelled collectives.

    with imagined_world(load_cluster("a800"), ranks=8) as world:    # the default process group
        mesh = init_device_mesh("cuda", (8,))

All ranks are alike: what this rank sends, its peers send too. So an all-gather repeats this rank's
tensor, a sum over n ranks is n times its own, a broadcast changes nothing, and in an all-to-all
what comes from d ranks before is what this rank sends d ranks on. Shapes, types and magnitudes are
those of a real run; the loss is not that of one.

A collective ends when its time on the cluster has passed. There is one queue for the links inside
the host and one for the network; mesh axes that use the same link share its queue. On the CPU the
results are filled in by the queue's thread, on CUDA by a side stream (see `imagined_cuda`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from interlace.errors import InputError, RunError
from interlace.hardware.cluster import Cluster, LinkName
from interlace.ir.graph import Kind
from interlace.lab import imagined_values as values
from interlace.lab.imagined_cuda import CompileKernel, CudaLink
from interlace.lab.imagined_values import Exchange
from interlace.lab.link_work import EmulatedLink, EmulatedWork

_NS_LINK_BITS = 8_000_000_000
"""On a link of this rate a byte takes a nanosecond, so that times can be queued as bytes."""


class ImaginedWorld:
    """Rank 0 of `ranks` ranks of a cluster, and the queues of its links."""

    def __init__(
        self, cluster: Cluster, ranks: int, slower: float, compile_kernel: CompileKernel | None
    ) -> None:
        self.cluster = cluster
        self.ranks = ranks
        self.slower = slower
        self._transfers_take_time = True
        self._compile_kernel = compile_kernel
        self._host_links: dict[LinkName, EmulatedLink] = {}
        self._cuda_links: dict[LinkName, CudaLink] = {}

    @property
    def label(self) -> str:
        """For reports, such as `imagined cluster a800, world 8`."""
        slower = f", links {self.slower:g} times slower" if self.slower != 1 else ""
        return f"imagined cluster {self.cluster.name}{slower}, world {self.ranks}"

    @contextmanager
    def free_transfers(self) -> Iterator[None]:
        """Inside, collectives take no time on their link: the bound that hiding cannot beat."""
        self._transfers_take_time = False
        try:
            yield
        finally:
            self._transfers_take_time = True

    def duration_ns(self, kind: Kind, full_bytes: int, ranks: Sequence[int]) -> int:
        """Time of a collective among global `ranks`; see `Cluster.collective_ns`."""
        if not self._transfers_take_time:
            return 0
        return round(self.slower * self.cluster.collective_ns(kind, full_bytes, ranks))

    def start(self, exchange: Exchange, ranks: Sequence[int]) -> dist.Work:
        """Queue one collective among global `ranks`."""
        tensors = exchange.tensors
        duration_ns = self.duration_ns(exchange.kind, exchange.full_bytes, ranks)
        if tensors and tensors[0].is_cuda:
            link = self._cuda_link(tensors[0].device, ranks)
            return link.start(exchange.fill, duration_ns, tensors)
        return self._on_host(exchange.fill, duration_ns, ranks, exchange.outputs)

    def meet(self, ranks: Sequence[int]) -> dist.Work:
        """A barrier: done when the collectives before it are."""
        return self._on_host(lambda: None, 0, ranks, [])

    def _on_host(
        self, fill: Callable[[], None], duration_ns: int, ranks: Sequence[int], outputs: list[Any]
    ) -> dist.Work:
        name = self.cluster.link_of(ranks)
        if name not in self._host_links:
            self._host_links[name] = EmulatedLink(rate_bits=_NS_LINK_BITS, latency_us=0.0)
        link = self._host_links[name]
        end_ns = link.send(duration_ns)
        work = EmulatedWork(_Filling(fill), link, outputs)
        work.follow_in_turn(end_ns)
        return work

    def _cuda_link(self, device: torch.device, ranks: Sequence[int]) -> CudaLink:
        name = self.cluster.link_of(ranks)
        if name not in self._cuda_links:
            if self._compile_kernel is None:
                raise InputError(
                    "this imagined world was made without kernels for CUDA tensors",
                    hint="pass compile_kernel=graphs.torch_private.compile_elementwise",
                )
            self._cuda_links[name] = CudaLink(
                device, self.cluster.sms_held(ranks), self._compile_kernel
            )
        return self._cuda_links[name]

    def close(self) -> None:
        """End the threads of the queues."""
        for link in self._host_links.values():
            link.threads.stop()


class _Filling(dist.Work):
    """The data part of a collective; whoever waits for it carries it out."""

    def __init__(self, fill: Callable[[], None]) -> None:
        super().__init__()
        self._fill = fill

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Write the outputs."""
        with torch.no_grad():  # by default a new thread records for autograd
            self._fill()
        return True


@contextmanager
def imagined_world(
    cluster: Cluster,
    ranks: int,
    *,
    slower: float = 1.0,
    compile_kernel: CompileKernel | None = None,
) -> Iterator[ImaginedWorld]:
    """The default process group: rank 0 of `ranks`, whose collectives take `slower` times as long
    as `cluster` says. `compile_kernel` is needed for CUDA tensors only.
    """
    if ranks < 2:
        raise InputError(
            f"a world of {ranks} has nobody to communicate with", hint="imagine 2 ranks or more"
        )
    cluster.require(ranks)
    if not 0 < slower < float("inf"):
        raise InputError(
            f"links cannot be {slower!r} times slower", hint="1 keeps the cluster's links"
        )
    world = ImaginedWorld(cluster, ranks, slower, compile_kernel)

    def create(options: Any, _: Any) -> "ImaginedProcessGroup":
        members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return ImaginedProcessGroup(world, members, options.group_rank)

    # torch keeps backends for good, so every world gets a name of its own.
    name = f"imagined-{len(dist.Backend.backend_list)}"
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        yield world
    finally:
        dist.destroy_process_group()
        world.close()


def _collective(exchange_of: Callable[..., Exchange]) -> Callable[..., dist.Work]:
    """A method with the arguments by which torch calls process groups."""

    def method(self: "ImaginedProcessGroup", *args: Any, **kwargs: Any) -> dist.Work:
        exchange = exchange_of(self.size(), self.rank(), *args, **kwargs)
        return self.world.start(exchange, self.members)

    return method


def _no_peer(name: str) -> Callable[..., dist.Work]:
    def method(_self: "ImaginedProcessGroup", *_: Any, **__: Any) -> dist.Work:
        raise RunError(
            f"{name} needs a real peer, and an imagined cluster has none",
            hint="use collectives in which all ranks do the same",
        )

    return method


class ImaginedProcessGroup(dist.ProcessGroup):
    """A group of ranks of an `ImaginedWorld`, by their global numbers; only this process exists."""

    def __init__(self, world: ImaginedWorld, members: tuple[int, ...], rank: int) -> None:
        # torch makes a group that calls Python back only by this signature, missing in its stubs.
        super().__init__(rank, len(members))  # pyrefly: ignore
        self.world = world
        self.members = members
        self._rank = rank
        # torch asks for devices and a default backend; this one talks to nobody.
        backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=30))
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        for device in ("cpu", "cuda"):
            self._register_backend(
                torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend
            )

    def size(self) -> int:
        """How many ranks the group has. Since torch 2.14 a group takes this from its default
        backend, which here is alone."""
        return len(self.members)

    def rank(self) -> int:
        """This process's place in the group."""
        return self._rank

    # Names by which torch's C++ asks.
    getSize, getRank = size, rank  # noqa: N815

    def barrier(self, *_: Any, **__: Any) -> dist.Work:
        """Done once its queue is empty, on the CPU: ranks that are alike arrive together."""
        return self.world.meet(self.members)

    allreduce = _collective(values.all_reduce)
    allreduce_coalesced = _collective(values.all_reduce)
    allgather = _collective(values.all_gather)
    all_gather_single = _collective(values.all_gather_single)
    all_gather_single_coalesced = _collective(values.all_gather_singles)
    reduce_scatter = _collective(values.reduce_scatter)
    reduce_scatter_single = _collective(values.reduce_scatter_single)
    reduce_scatter_single_coalesced = _collective(values.reduce_scatter_singles)
    alltoall = _collective(values.all_to_all)
    all_to_all_single = _collective(values.all_to_all_single)
    broadcast = _collective(values.broadcast)

    reduce, gather, scatter = _no_peer("reduce"), _no_peer("gather"), _no_peer("scatter")
    send, recv, recv_anysource = _no_peer("send"), _no_peer("recv"), _no_peer("recv_anysource")

    # Names by which torch 2.11 calls the same operations.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
