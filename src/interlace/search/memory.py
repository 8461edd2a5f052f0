"""Peak memory of an order, counted exactly from liveness.

A value lives from the issue of its operator to its last reader, as in the lowered graph, which
drops every name after its last use. Two rules follow the runtime: what a collective reads lives
until somebody waits for it (its work object holds it), and outputs live to the end. Saved values
that the graph is given (role `saved`) live from the start to their last reader; parameters,
gradient buffers and batches are there anyway and are not counted.

So what is alive depends on the set of operators issued, not on their order.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from interlace.ir.actions import Action, Direction, Share, Strand, strands_of
from interlace.ir.graph import OpGraph, once_a_graph
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


@once_a_graph
def liveness(graph: OpGraph) -> Liveness:
    """The same for who asks again."""
    return Liveness(graph)


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
    values = liveness(graph)
    return peak_of(values, [values.number[name] for name in order])


def step_peak_bytes(
    plan: Plan,
    graphs: Mapping[str, OpGraph],
    schedule: Schedule | None = None,
    *,
    micro_batches: int = MOST,
) -> int:
    """The largest number of bytes alive in a step of `plan`; `graphs` are those of the strands.

    To the peak of each phase come the values that are on their way meanwhile: made in an earlier
    action, read in a later one, and neither in this one."""
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


def chunk_bytes(graphs: Mapping[str, OpGraph], chunk: int | None) -> tuple[int, int]:
    """What a chunk's forward keeps for its backward, and what of it, and of what the gradients of
    inputs made, the gradients of weights need; 0 for what there is no graph of."""
    shares = (Share.WHOLE, Share.WEIGHT)
    found = [graphs.get(Strand(Direction.BACKWARD, chunk, share).label) for share in shares]
    saved, kept = (
        sum(each.bytes for each in graph.inputs if each.role == "saved") if graph else 0
        for graph in found
    )
    return saved, kept


_Handed = dict[str, dict[str, int]]
"""By label of strand: names of values with their bytes."""


def _resting_bytes(actions: Sequence[Action], of_phase: Mapping[str, OpGraph]) -> list[int]:
    """By action: bytes of values that wait while it runs."""
    given = {name: _by_label(name, graph, given=True) for name, graph in of_phase.items()}
    made = {name: _by_label(name, graph, given=False) for name, graph in of_phase.items()}
    change = [0] * (len(actions) + 1)
    since: dict[tuple[int, str], int] = {}
    forwards: dict[tuple[int, int | None], int] = {}
    for now, action in enumerate(actions):
        for slot in action.slots:
            of, label = slot.micro_batch, slot.strand.label
            is_forward = slot.strand.direction == Direction.FORWARD
            for name, size in given[action.phase].get(label, {}).items():
                # What a backward is given has the name of a value, which a view may stand for.
                origin = now if is_forward else forwards.get((of, slot.strand.chunk), now)
                start = since.get((of, name), origin)
                if now > start + 1:
                    change[start + 1] += size
                    change[now] -= size
                since[of, name] = now
            since |= {(of, name): now for name in made[action.phase].get(label, {})}
            if is_forward:
                forwards[of, slot.strand.chunk] = now
    return list(accumulate(change))[:-1]


def _by_label(phase: str, graph: OpGraph, *, given: bool) -> _Handed:
    """What each strand of a phase is given by earlier ones, or makes."""
    strands = strands_of(phase)
    alone = strands[0].label if len(strands) == 1 else ""
    values = (
        [(i.id, i.bytes) for i in graph.inputs if i.role == "saved"]
        if given
        else [(op.id, op.bytes_out) for op in graph.operators]
    )
    found: _Handed = {}
    for name, size in values:
        label, _, short = ("", "", name) if alone else name.rpartition(".")
        found.setdefault(alone or label, {})[short] = size
    return found
