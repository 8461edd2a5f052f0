"""What a resharding plan is: tensors, unit slices, and messages in one global order.

Every strategy ends as a list of point-to-point `Transfer`s. A rank walks the list and does its own
sends and receives; since all ranks walk the same list, no order of it can deadlock. Plans are made
by `make_plan.make_plan`, and run on paper by `simulate.simulate`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from interlace.errors import InputError
from interlace.hardware.topology import Topology
from interlace.reshard.planning.layout import PARTIAL, Box, Layout

STRATEGIES = ("auto", "send_recv", "local_all_gather", "global_all_gather", "broadcast")
"""Ways for a bundle to travel (`strategies`); `auto` chooses."""
ORDERS = ("auto", "naive", "load_balance", "search", "random_greedy", "exact", "balanced")
"""`balanced` is the chunk-level schedule in which several senders share a task; `auto` takes it, or
`search` where that is no slower and needs fewer connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor to move. A partial source is reduced first; `source` is the layout after that."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    """Bytes of one element."""
    source: Layout
    destination: Layout

    def __post_init__(self) -> None:
        for which, layout in (("source", self.source), ("destination", self.destination)):
            if layout.shape != self.shape:
                raise InputError(
                    f"tensor {self.name!r}: shape {self.shape}, but the {which} layout is for "
                    f"{layout.shape}",
                    hint="give both layouts the tensor's own shape",
                )
            if PARTIAL in layout.placements:
                raise InputError(
                    f"tensor {self.name!r}: the {which} layout is partial",
                    hint="reduce the source first; a destination cannot be partial",
                )
        if self.itemsize < 1:
            raise InputError(
                f"tensor {self.name!r}: {self.itemsize} bytes per element",
                hint="an element has at least one byte",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A unit slice: one destination tile intersected with one source tile (paper, section 3).

    Equal tensors (same shape, element size and layouts) share tasks: the task's elements are those
    of `box` in row-major order of the first tensor, then of the second, and so on.
    """

    tensors: tuple[int, ...]
    """Indexes into the plan's specs."""
    box: Box
    senders: tuple[int, ...]
    """Ranks that hold the slice, in mesh order."""
    receivers: tuple[int, ...]
    """Ranks that need it and do not hold it."""

    @property
    def box_elements(self) -> int:
        """Elements of the box in one tensor."""
        return prod(stop - start for start, stop in self.box)

    @property
    def elements(self) -> int:
        """Elements of the box in all tensors."""
        return len(self.tensors) * self.box_elements


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of a task."""

    task: int
    start: int
    stop: int

    def in_tensors(self, task: Task) -> Iterator[tuple[int, int, int]]:
        """(tensor, start, stop) of each tensor touched; positions count from its own box."""
        each = task.box_elements
        for i in range(self.start // each, -(-self.stop // each)):
            yield (
                task.tensors[i],
                max(self.start - i * each, 0),
                min(self.stop - i * each, each),
            )


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message. The sender holds the source tile or received these parts earlier in the list."""

    sender: int
    receiver: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A local copy of a whole task: this rank holds the slice and needs it."""

    rank: int
    task: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """How a set of tensors moves; equal inputs give equal plans on every rank."""

    specs: tuple[TensorSpec, ...]
    topology: Topology
    tasks: tuple[Task, ...]
    transfers: tuple[Transfer, ...]
    """In the global order."""
    copies: tuple[Copy, ...]
    strategy: str
    order: str
    predicted_ns: int
    """Simulated time of the transfers."""
    lower_bound_ns: int
    """No schedule on this topology is shorter."""
    digest: str
    """SHA-256 of all of the above."""

    def part_bytes(self, part: Part) -> int:
        """Bytes of one part."""
        itemsize = self.specs[self.tasks[part.task].tensors[0]].itemsize
        return (part.stop - part.start) * itemsize

    def transfer_bytes(self, transfer: Transfer) -> int:
        """Bytes of one message."""
        return sum(map(self.part_bytes, transfer.parts))

    def of_rank(self, rank: int) -> Iterator[tuple[int, Transfer]]:
        """This rank's own sends and receives with their positions in the global order."""
        for i, transfer in enumerate(self.transfers):
            if rank in (transfer.sender, transfer.receiver):
                yield i, transfer


def sub_boxes(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Boxes that together are elements [start, stop) of `box` in row-major order, in that order.

    At most 2 d - 1 boxes for d dimensions, so a part is copied by a few strided copies.
    """
    if start >= stop:
        return
    if not box or (start == 0 and stop == prod(b - a for a, b in box)):
        yield box
        return
    first, rest = box[0][0], box[1:]
    row = prod(b - a for a, b in rest)
    low, high = -(-start // row), stop // row  # whole rows
    if low > high:  # inside one row
        index = first + high
        yield from (((index, index + 1), *b) for b in sub_boxes(rest, start % row, stop % row))
        return
    if start < low * row:
        index = first + low - 1
        yield from (((index, index + 1), *b) for b in sub_boxes(rest, start % row, row))
    if low < high:
        yield ((first + low, first + high), *rest)
    if stop > high * row:
        index = first + high
        yield from (((index, index + 1), *b) for b in sub_boxes(rest, 0, stop % row))
