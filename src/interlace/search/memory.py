"""Peak memory of an order, counted exactly from liveness.

A value lives from the issue of its operator to its last reader, as in the lowered graph, which
drops every name after its last use. Two rules follow the runtime: what a collective reads lives
until somebody waits for it (its work object holds it), and outputs live to the end. Saved values
that the graph is given (role `saved`) live from the start to their last reader; parameters,
gradient buffers and batches are there anyway and are not counted.

So what is alive depends on the set of operators issued, not on their order.
"""

from collections.abc import Iterable, Mapping, Sequence

from interlace.ir.actions import Action, label_of
from interlace.ir.graph import OpGraph
from interlace.ir.phases import phase_graph
from interlace.ir.plan import Plan
from interlace.schedules.finder import MOST, Schedule, find


class Liveness:
    """Values of a graph as numbers: those of operators first, then the saved ones."""

    def __init__(self, graph: OpGraph) -> None:
        operators = graph.operators
        number = {op.id: i for i, op in enumerate(operators)}
        saved = [i for i in graph.inputs if i.role == "saved" and i.id not in number]
        value = number | {given.id: len(number) + k for k, given in enumerate(saved)}
        self.count = len(operators)
        self.number = number
        self.size = [op.bytes_out for op in operators] + [given.bytes for given in saved]
        self.start = sum(given.bytes for given in saved)
        """Bytes alive before the first operator."""
        outputs = set(graph.outputs)
        self.kept = [op.id in outputs for op in operators] + [i.id in outputs for i in saved]
        self.reads = [
            tuple(dict.fromkeys(value[n] for n in (*op.inputs, *op.reads) if n in value))
            for op in operators
        ]
        self.collectives = [op.is_collective for op in operators]
        self.waits = [
            tuple(v for v in own if v < self.count and self.collectives[v]) for own in self.reads
        ]
        """Collectives that an operator waits for."""
        self.users: list[list[int]] = [[] for _ in self.size]
        for i, own in enumerate(self.reads):
            for read in own:
                self.users[read].append(i)
        self.pending = [len(users) for users in self.users]
        """Reads, and collectives that hold a value until somebody waits for them."""
        for i, own in enumerate(self.reads):
            if self.collectives[i] and self.users[i]:
                for read in own:
                    self.pending[read] += 1


class Alive:
    """Bytes alive while operators are issued one by one."""

    def __init__(self, values: Liveness) -> None:
        self.values = values
        self.pending = values.pending.copy()
        self.waited = [False] * values.count
        self.bytes = values.start
        self.peak = values.start

    def copy(self) -> "Alive":
        """Another one in the same state."""
        twin = Alive.__new__(Alive)
        twin.values, twin.bytes, twin.peak = self.values, self.bytes, self.peak
        twin.pending, twin.waited = self.pending.copy(), self.waited.copy()
        return twin

    def issue(self, i: int) -> int:
        """Issue an operator; the bytes alive while it runs."""
        values = self.values
        self.bytes += values.size[i]
        during = self.bytes
        self.peak = max(self.peak, during)
        for collective in values.waits[i]:
            if not self.waited[collective]:
                self.waited[collective] = True
                for read in values.reads[collective]:
                    self._let_go(read)
        for read in values.reads[i]:
            self._let_go(read)
        if not values.pending[i] and not values.kept[i]:
            self.bytes -= values.size[i]
        return during

    def growth(self, i: int) -> int:
        """By how much the bytes alive would be more after operator i."""
        values = self.values
        goes: dict[int, int] = dict.fromkeys(values.reads[i], 1)
        for collective in values.waits[i]:
            if not self.waited[collective]:
                for read in values.reads[collective]:
                    goes[read] = goes.get(read, 0) + 1
        freed = [v for v, count in goes.items() if self.pending[v] == count and not values.kept[v]]
        grown = values.size[i] if values.pending[i] or values.kept[i] else 0
        return grown - sum(values.size[v] for v in freed)

    def _let_go(self, value: int) -> None:
        self.pending[value] -= 1
        if not self.pending[value] and not self.values.kept[value]:
            self.bytes -= self.values.size[value]


def peak_of(values: Liveness, order: Iterable[int]) -> int:
    """Largest number of bytes alive at any moment of an order of operator numbers."""
    alive = Alive(values)
    for i in order:
        alive.issue(i)
    return alive.peak


def peak_bytes(graph: OpGraph, order: Sequence[str]) -> int:
    """Largest number of bytes alive at any moment of `order`."""
    values = Liveness(graph)
    return peak_of(values, [values.number[name] for name in order])


def step_peak_bytes(
    plan: Plan,
    graphs: Mapping[str, OpGraph],
    schedule: Schedule | None = None,
    *,
    micro_batches: int = MOST,
) -> int:
    """The largest number of bytes alive in a step of `plan`; `graphs` are those of the strands.

    To the peak of each phase come the values of micro-batches that are on their way meanwhile:
    what the next strand of each is given."""
    schedule = schedule or find(plan.schedule)
    of_phase: dict[str, OpGraph] = {}
    peaks: dict[str, int] = {}
    for name in schedule.phases(graphs, head=bool(plan.head)):
        of_phase[name] = phase_graph(name, graphs, plan.head)
        peaks[name] = peak_bytes(of_phase[name], plan.needed(name).order)
    actions = schedule.actions(max(2, micro_batches), graphs, head=bool(plan.head))
    resting = _resting_bytes(actions, of_phase)
    held = [peaks[a.phase] + more for a, more in zip(actions, resting, strict=True)]
    return max(*peaks.values(), *held)


def _resting_bytes(actions: Sequence[Action], of_phase: Mapping[str, OpGraph]) -> list[int]:
    """By action: bytes saved for micro-batches that have begun, are not at an end, and have no
    strand in that action."""
    resting: list[int] = []
    waiting: dict[int, int] = {}
    for action in reversed(actions):
        present = {slot.micro_batch for slot in action.slots}
        resting.append(sum(size for index, size in waiting.items() if index not in present))
        taken = _saved_bytes(of_phase[action.phase])
        sizes: dict[int, int] = {}
        for slot in action.slots:
            label = slot.strand.label if len(action.slots) > 1 else ""
            size = sizes.get(slot.micro_batch, 0) + taken.get(label, 0)
            sizes[slot.micro_batch] = size
        waiting |= sizes
    return resting[::-1]


def _saved_bytes(graph: OpGraph) -> dict[str, int]:
    """By label of strand: bytes of what it is given of an earlier strand."""
    found: dict[str, int] = {}
    for given in graph.inputs:
        if given.role == "saved":
            label = label_of(given.id)
            found[label] = found.get(label, 0) + given.bytes
    return found
