"""`reshard` moves one tensor to another mesh; `ReshardPlan` many, as often as you like."""

import weakref
from collections.abc import Mapping
from typing import Self

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.errors import InputError, PeerError, RunError
from interlace.reshard.agreement import Agreement, agree_on_moves, agree_on_tensors
from interlace.reshard.handle import Handle, ending_on_error
from interlace.reshard.inputs import Move, Placements, PlacementsOf, check_planned
from interlace.reshard.peers import Peers
from interlace.reshard.planning.describe import describe
from interlace.reshard.planning.transfer_plan import TransferPlan
from interlace.reshard.roll import fresh
from interlace.reshard.settings import Settings
from interlace.reshard.watch import TransferWatch


def reshard(
    x: DTensor | None,
    dst_mesh: DeviceMesh,
    dst_placements: Placements,
    src_mesh: DeviceMesh | None = None,
    *,
    settings: Settings | None = None,
) -> DTensor | None:
    """`x` on another mesh with any placements, bit for bit; `x` itself is left untouched.

    Called by all ranks of both meshes, which may overlap; `x` is None outside the source mesh,
    and the result outside the destination mesh. Give `src_mesh` on all ranks, or on none: then
    all ranks of the group call. Partial sources are reduced. No gradient flows through.
    Raises InputError for what cannot be moved, on all ranks, and PeerError for ranks that do not
    come, die or stall. To move something repeatedly, make a `ReshardPlan` once.
    """
    tensors = None if x is None else {"x": x}
    plan = ReshardPlan.of(tensors, dst_mesh, dst_placements, src_mesh, settings=settings)
    return plan.start(tensors).wait()[plan.names[0]]


class ReshardPlan:
    """Many tensors that move together, planned once: `plan.start(tensors).wait()` moves them.

    All ranks of all meshes make it, from equal `Move`s by name. Raises InputError or PeerError as
    `reshard` does.
    """

    def __init__(self, specs: Mapping[str, Move], *, settings: Settings | None = None) -> None:
        settings = settings or Settings()
        self._set(agree_on_moves(specs, settings), settings)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, DTensor] | None,
        dst_mesh: DeviceMesh,
        dst_placements: PlacementsOf,
        src_mesh: DeviceMesh | None = None,
        *,
        settings: Settings | None = None,
    ) -> Self:
        """A plan for a whole state dict from one mesh to another; None outside the source mesh.

        `src_mesh`: on all ranks, or on none (then all ranks of the group call).
        """
        settings = settings or Settings()
        agreement = agree_on_tensors(tensors, dst_mesh, dst_placements, src_mesh, settings)
        plan = cls.__new__(cls)
        plan._set(agreement, settings)
        return plan

    def _set(self, agreement: Agreement, settings: Settings) -> None:
        self._agreement = agreement
        self._settings = settings
        self._handle: weakref.ref[Handle] | None = None

    @property
    def plan(self) -> TransferPlan:
        """What moves in which order, its predicted time and the lower bound."""
        return self._agreement.plan

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in their order."""
        return tuple(item.name for item in self._agreement.items)

    def describe(self) -> str:
        """Tasks, senders, order, bytes per link, predicted time and lower bound, as text."""
        return describe(self.plan)

    def start(
        self, tensors: Mapping[str, DTensor | None] | None = None, *, step: int | None = None
    ) -> Handle:
        """Begins to move the tensors of the source mesh; None on ranks outside of it.

        Does not wait for other ranks, but where a partial source is reduced. One transfer of a
        plan at a time. Raises InputError for tensors other than planned; the plan is closed then
        on this rank, and ranks that begin this transfer get a PeerError that names it.

        `step`: any number that ranks must have in common in this transfer, if given. Transfers
        are matched by their count; a rank that left one out is found out by it alone.
        """
        settings, agreed = self._settings, self._agreement
        roll = agreed.roll
        self._check_open()
        try:
            roll.check_idle()
            sources = self._sources(tensors or {})
        except BaseException as error:
            roll.refuse(error)
            raise
        number, watch = roll.number + 1, None
        if settings.watch:
            watch = TransferWatch(agreed.watch_store, agreed.people, agreed.rank, number)
        peers = Peers(roll, number, world=agreed.world, watch=watch, timeout_s=settings.timeout_s)
        if watch is not None:
            try:
                watch.__enter__()
            except PeerError as error:
                roll.fail(number, error, tell=False)
                raise
        with ending_on_error(peers):
            roll.begin(step=step, turns=agreed.turns())
            handle = Handle(
                agreed.items,
                agreed.program,
                sources,
                wire=agreed.wire,
                peers=peers,
                device=agreed.device,
                memory_bytes=settings.memory_bytes,
                outstanding=settings.outstanding,
                world=agreed.world,
                plan=agreed.number,
            )
        self._handle = weakref.ref(handle)
        return handle

    def _check_open(self) -> None:
        """Raises, if this rank refused or failed in a transfer, the reason.

        A transfer that it never waited for and now never will is given up: others wait for it.
        """
        roll = self._agreement.roll
        if roll.closed is None:
            return
        handle = None if self._handle is None else self._handle()
        if roll.under_way and handle is not None:
            what = roll.transfer(roll.number)
            handle.abandon(RunError(f"start was called again and again before wait for {what}"))
        raise fresh(roll.closed)

    def _sources(self, tensors: Mapping[str, DTensor | None]) -> list[DTensor | None]:
        """The tensors in the order of the plan, as planned."""
        unknown = tensors.keys() - set(self.names)
        if unknown:
            raise InputError(
                f"the plan has no tensor {min(unknown)!r}", hint="plan for it, or leave it out"
            )
        rank = self._agreement.rank
        found: list[DTensor | None] = []
        for item in self._agreement.items:
            tensor = None
            if rank in item.source.mesh.ranks:
                tensor = tensors.get(item.name)
                check_planned(tensor, item, rank)
            found.append(tensor)
        return found
