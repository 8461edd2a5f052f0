"""One rank's walk through a plan: its sends and receives in the global order, and its copies."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from interlace.reshard.messages import Boxes, Message, Region, local_region, split_parts
from interlace.reshard.planning.transfer_plan import Part, TransferPlan


@dataclass(frozen=True, slots=True)
class Operation:
    """A send or a receive."""

    peer: int
    """Global rank."""
    sends: bool
    message: Message
    after: tuple[int, ...] = ()
    """Receives, by their index in the program, that bring what a send forwards."""


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A region of a source tensor that this rank needs as well."""

    tensor: int
    source: Region
    destination: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one rank does."""

    operations: tuple[Operation, ...]
    copies: tuple[LocalCopy, ...]
    boxes: Boxes


class _Arrivals:
    """Which receive brings which part."""

    def __init__(self) -> None:
        self._exact: dict[Part, int] = {}
        self._of_task: dict[int, list[tuple[Part, int]]] = defaultdict(list)

    def add(self, part: Part, index: int) -> None:
        self._exact[part] = index
        self._of_task[part.task].append((part, index))

    def bringers(self, parts: Iterable[Part]) -> tuple[int, ...]:
        """The receives that overlap any of the parts."""
        found: set[int] = set()
        for part in parts:
            if part in self._exact:  # elements arrive once: no other overlaps
                found.add(self._exact[part])
                continue
            found.update(
                index
                for arrived, index in self._of_task[part.task]
                if arrived.start < part.stop and part.start < arrived.stop
            )
        return tuple(sorted(found))


def make_program(plan: TransferPlan, rank: int, *, most_bytes: int) -> Program:
    """This rank's program. Messages above `most_bytes` are cut, by both sides alike."""
    boxes = Boxes(
        tuple(spec.source.box(rank) for spec in plan.specs),
        tuple(spec.destination.box(rank) for spec in plan.specs),
    )
    operations: list[Operation] = []
    arrivals = _Arrivals()
    for _, transfer in plan.of_rank(rank):
        sends = transfer.sender == rank
        peer = transfer.receiver if sends else transfer.sender
        for parts in split_parts(plan, transfer.parts, most_bytes):
            owned = [(part, sends and rank in plan.tasks[part.task].senders) for part in parts]
            after: tuple[int, ...] = ()
            if sends:
                after = arrivals.bringers(part for part, own in owned if not own)
            else:
                for part in parts:
                    arrivals.add(part, len(operations))
            operations.append(Operation(peer, sends, boxes.make_message(plan, owned), after))
    return Program(operations=tuple(operations), copies=_copies(plan, rank, boxes), boxes=boxes)


def receives_first(program: Program) -> Program:
    """The same with all receives in front, for who waits only once all is issued: on gloo nothing
    moves before its receive is posted. Between two ranks each direction keeps its order."""
    operations = program.operations
    order = sorted(range(len(operations)), key=lambda index: operations[index].sends)
    place = {index: at for at, index in enumerate(order)}
    moved = (
        replace(operations[index], after=tuple(place[each] for each in operations[index].after))
        for index in order
    )
    return replace(program, operations=tuple(moved))


def _copies(plan: TransferPlan, rank: int, boxes: Boxes) -> tuple[LocalCopy, ...]:
    found = []
    for copy in plan.copies:
        if copy.rank != rank:
            continue
        box, tensors = plan.tasks[copy.task].box, plan.tasks[copy.task].tensors
        for tensor in tensors:
            source, destination = boxes.sources[tensor], boxes.destinations[tensor]
            assert source is not None
            assert destination is not None
            found.append(
                LocalCopy(tensor, local_region(box, source), local_region(box, destination))
            )
    return tuple(found)
