"""A `StageLink` between stages that are laid out differently: each message is a planned resharding.

All ranks of a stage send their parts of a message, and receive theirs. A rank that has to pass a
part on, to others of its stage, does so when it waits for the message itself.

Ranks along a data axis hold consecutive rows of each tensor of a micro-batch. If a stage was given
rows in another order than the next, every number of the step would be that of other samples, so
they are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.errors import InputError
from interlace.ir.stage_messages import StageMessage
from interlace.ranks.agree import listed
from interlace.ranks.replicas import fingerprints
from interlace.ranks.small_collectives import gather_json
from interlace.reshard.flight import Flight
from interlace.reshard.messages import Shards
from interlace.reshard.planning.inferred_layouts import InferredLayouts
from interlace.reshard.wire import Buffers, Wire
from interlace.runtime.boundaries import Boundary, boundaries_of
from interlace.runtime.handovers import ChunkRoute, Handovers
from interlace.runtime.joint_end import WAIT_S
from interlace.runtime.stage_link import Arrival, StageLink, T, Transit
from interlace.runtime.stage_meshes import DATA_AXES, StageMeshes

_MOST_BYTES = 1 << 40
"""Bytes that messages under way may take: no bound. Each is a part of a tensor that the step holds
anyway."""
_MOST_SENDS = 1 << 30
"""Sends of a message that may be under way: no bound, as nobody waits before they all are."""
_Rows = tuple[str, ...]
"""A digest of each row of a tensor."""


class LaidOutLink(StageLink):
    """What a stage sends to the others, and receives. `rank` and `ranks` count stages."""

    def __init__(
        self,
        stages: StageMeshes,
        device: torch.device,
        *,
        replicas: dist.ProcessGroup | None = None,
        around: Sequence[dist.ProcessGroup] = (),
        wait_s: float = WAIT_S,
        strategy: str = "auto",
    ) -> None:
        """As `StageLink`; messages move by a strategy of `reshard.planning.make_plan`. Raises
        InputError for a backend other than gloo, which alone tells messages apart by their tags."""
        everyone = dist.group.WORLD
        assert everyone is not None
        super().__init__(
            everyone, device, replicas=replicas, around=[*around, stages.stage], wait_s=wait_s
        )
        if not self.is_unordered:
            raise InputError(
                "stages that are laid out differently exchange over gloo only, and the default "
                f"process group has {dist.get_backend_config()} for tensors on {device}",
                hint="lay all stages out alike, with a mesh axis pp",
            )
        self.rank, self.ranks = stages.number, len(stages.meshes)
        self._stages = stages
        self._strategy = strategy
        self._leads = dist.get_rank() == stages.leaders[stages.number]
        self._boundaries: dict[ChunkRoute, Boundary] = {}
        self._loss_ranks = 1
        self._messages = 0
        """Routes between chunks, those of other stages too."""
        self._compared: set[ChunkRoute] = set()
        """Routes whose copies have been compared."""
        self._looked = False

    @property
    def loss_ranks(self) -> int:
        """Those of the stage with the last chunk that see different samples."""
        return self._loss_ranks

    def who(self, rank: int) -> str:
        """A stage, and its ranks."""
        ranks = self._stages.meshes[rank].ranks
        return f"stage {rank} (rank{'s' * (len(ranks) > 1)} {listed(ranks)})"

    def job_rank(self, rank: int) -> int:
        """The first rank of a stage."""
        return self._stages.leaders[rank]

    def prepare(self, handovers: Handovers) -> None:
        """Plan how each message moves."""
        self._boundaries = boundaries_of(handovers, self._stages, self._strategy)
        self._loss_ranks = self.gather(self.data_ranks)[handovers.rank_of[-1]]
        self._messages = len(handovers.rank_of) ** 2 * 2

    def first_look(self, batches: Sequence[Sequence[Tensor]]) -> None:
        """All stages are given the same samples: compared in the first step."""
        if not self._looked:
            check_same_samples(batches[0], self._stages)
            self._looked = True

    def send_message(
        self, message: StageMessage, tensors: Sequence[Tensor], to: int, what: str
    ) -> None:
        """Give this rank's parts of what a chunk hands over to the ranks of another stage."""
        boundary = self._boundary(message)
        parts = [_under(tensors[place], each.leading) for place, each in _placed(boundary)]
        if (route := _route(message)) not in self._compared:
            self._compare(boundary, parts, what)
            self._compared.add(route)
        nothing = [None] * len(parts)
        self._forget_gone()
        self._leaving.append(self._begun(message, boundary, Shards(parts, nothing), what))

    def receive_message(
        self, message: StageMessage, like: Sequence[Tensor], source: int, what: str
    ) -> Arrival:
        """Be ready for this rank's parts."""
        boundary = self._boundary(message)
        tensors = tuple(self.empty(each) for each in like)
        parts = [_under(tensors[place], each.leading) for place, each in _placed(boundary)]
        nothing = [None] * len(parts)
        transit = self._begun(message, boundary, Shards(nothing, parts), what)
        return Arrival(tensors, (transit,))

    def send(self, tensors: Sequence[Tensor], to: int, what: str) -> None:
        """Give tensors from the first rank of this stage to that of another one."""
        if self._leads:
            super().send(tensors, self._stages.leaders[to], what)

    def receive(self, like: Sequence[Tensor], source: int, what: str) -> Arrival:
        """The other end of `send`."""
        if not self._leads:
            return Arrival(tuple(self.empty(each) for each in like), ())
        return super().receive(like, self._stages.leaders[source], what)

    def gather(self, value: T) -> list[T]:
        """What the first rank of every stage gives, by stage."""
        of_ranks = super().gather(value)
        return [of_ranks[leader] for leader in self._stages.leaders]

    def add_up(self, tensor: Tensor, what: str) -> None:
        """Replace a tensor, which the ranks of a stage have alike, by its sum over stages."""
        if not self._leads:
            tensor.zero_()
        super().add_up(tensor, what)

    def share(self, tensor: Tensor, source: int, what: str) -> None:
        """Give every rank what `tensor` holds on the ranks of a stage."""
        super().share(tensor, self._stages.leaders[source], what)

    def averaged(self, losses: Tensor) -> Tensor:
        """Their mean over the ranks of this stage that see different samples."""
        if self.data_ranks == 1:
            return losses
        total = losses.clone()
        with self._said("the mean of the losses over replicas"):
            self._ended(dist.all_reduce(total, group=self._replicas, async_op=True))
        return total / self.data_ranks

    def _boundary(self, message: StageMessage) -> Boundary:
        return self._boundaries[_route(message)]

    def _begun(
        self, message: StageMessage, boundary: Boundary, shards: Shards, what: str
    ) -> Transit:
        number = message.micro_batch * self._messages + boundary.number
        everyone = dist.group.WORLD
        assert everyone is not None
        with self._said(what):
            work = _FlightWork(
                Flight(
                    boundary.program,
                    shards,
                    wire=Wire(group=everyone, plan=number),
                    buffers=Buffers(_MOST_BYTES, self.device),
                    ahead=None,
                    outstanding=_MOST_SENDS,
                    wait_for=lambda work, peer: self._ended(work),
                    explain=lambda error, peer: error,
                )
            )
        return Transit(work, shards, what)

    def _compare(self, boundary: Boundary, parts: Sequence[Tensor], what: str) -> None:
        """Raise InputError, on all ranks of the stage alike, unless those that are taken to hold
        the same part of a tensor do. Partial sums would be lost otherwise."""
        layouts = [each.source for each in boundary.layouts]
        if all(len(tiles) == 1 for layout in layouts for tiles in layout.tiles().values()):
            return
        own = [each.hex() for each in fingerprints(parts)]
        of_ranks = gather_json(own, self._stages.stage)
        ranks = self._stages.meshes[self.rank].ranks
        for place, layout in enumerate(layouts):
            digest = {rank: said[place] for rank, said in zip(ranks, of_ranks, strict=True)}
            for holders in layout.tiles().values():
                first = holders[0]
                for rank in holders[1:]:
                    if digest[rank] != digest[first]:
                        raise InputError(
                            f"{what}: {boundary.names[place]} differs between ranks {first} and "
                            f"{rank}, which by its shape hold the same",
                            hint="where a stage ends, all its ranks must hold a value alike or in "
                            "equal parts: end it behind the collective that adds the value up",
                        )


@dataclass(frozen=True)
class _FlightWork:
    """All sends and receives of a message, as one work."""

    flight: Flight

    def __post_init__(self) -> None:
        self.flight.issue()

    def is_completed(self) -> bool:
        """Whether all have been waited for."""
        return self.flight.done

    def wait(self, timeout: timedelta | None = None) -> None:
        """Finish them one after the other, and pass on what others need of this rank."""
        while not self.flight.done:
            self.flight.step()


def _placed(boundary: Boundary) -> list[tuple[int, InferredLayouts]]:
    return list(zip(boundary.order, boundary.layouts, strict=True))


def _route(message: StageMessage) -> ChunkRoute:
    return message.direction, message.source, message.to


def _under(tensor: Tensor, leading: int) -> Tensor:
    """The tensor with so many dimensions of size 1 in front."""
    return tensor[(None,) * leading] if leading else tensor


def check_same_samples(batch: Sequence[Tensor], stages: StageMeshes) -> None:
    """Raise InputError, on all ranks alike, unless each tensor of this micro-batch is the same for
    all stages: its rows, over the ranks of data axes put together, or what every rank holds whole.
    Collective on the default group."""
    own = [_rows(tensor) for tensor in batch]
    of_ranks = [
        [tuple(rows) for rows in said] for said in gather_json([list(rows) for rows in own], None)
    ]
    for place in range(len(batch)):
        held = {rank: of_ranks[rank][place] for rank in range(dist.get_world_size())}
        if len(set(held.values())) == 1:
            continue
        seen = [_joined(held, stages, number) for number in range(len(stages.meshes))]
        for number, each in enumerate(seen):
            if each != seen[0]:
                raise InputError(
                    f"tensor {place} of the first micro-batch is not the same for stages 0 and "
                    f"{number}: {stages.meshes[0]}, {stages.meshes[number]}",
                    hint="give each rank its rows of one and the same micro-batch: the ranks of "
                    f"{' and '.join(DATA_AXES)} of a stage hold consecutive ones, as by "
                    "torch.chunk, and all other ranks of a stage the same",
                )


def _joined(held: Mapping[int, _Rows], stages: StageMeshes, number: int) -> set[_Rows]:
    """The whole tensor of a stage, one for each place on axes that are no data axes."""
    found: dict[tuple[int, ...], _Rows] = {}
    for rank in stages.meshes[number].ranks:
        place = stages.place(rank)
        other = tuple(at for axis, at in place.items() if axis not in DATA_AXES)
        found[other] = (*found.get(other, ()), *held[rank])
    return set(found.values())


def _rows(tensor: Tensor) -> list[str]:
    """A digest of each row, or of the whole if it has none."""
    rows = tensor.detach().unbind() if tensor.ndim else (tensor.detach(),)
    return [each.hex() for each in fingerprints(rows)]
