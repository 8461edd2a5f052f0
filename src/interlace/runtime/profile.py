"""Profile a chunk: operators alone in a real step, and what kinds that overlap do to each other.

Collective: all ranks measure the same things in the same order, which follows from the graphs and
from times that they have agreed on.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from interlace.cost.profile import measure
from interlace.graphs.lower import lower
from interlace.ir.costs import CostTable, PairCost
from interlace.ir.graph import Kind, OpGraph
from interlace.ir.timeline import Timeline
from interlace.runtime.executor import Batch, StrandExecutor, local
from interlace.runtime.operands import Capture
from interlace.runtime.pairs import measure_pair
from interlace.runtime.recorder import Recorder, clock_for
from interlace.runtime.strands import Strands

NOTABLE = 0.1
"""A kind with a smaller share of a step's compute or communication gets no pair at start-up."""
START_UP_BUDGET_NS = 100e6
"""Time for one pair at start-up; three rounds are run in any case."""


@dataclass(frozen=True)
class Profiler:
    """A chunk whose operators run one after the other, each collective waited for at once."""

    strands: Strands
    executor: StrandExecutor
    batch: Batch
    device_type: str

    @property
    def graphs(self) -> dict[str, OpGraph]:
        """Both directions."""
        return {name: self.strands.op_graphs[name] for name in ("forward", "backward")}

    def run_once(self) -> Timeline:
        """One micro-batch forward and backward, recorded."""
        recorder = Recorder(self.strands.op_graphs, clock_for(self.device_type))
        self.executor.step([self.batch], recorder)
        return recorder.timeline("profile", 0)

    def capture(self, keys: Iterable[str]) -> Capture:
        """What the first operator of each of these keys is called with in a step."""
        capture = Capture(
            self.strands.op_graphs, clock_for(self.device_type), wanted=frozenset(keys)
        )
        self.executor.step([self.batch], capture)
        return capture


def open_profiler(strands: Strands, batch: Batch, device_type: str) -> Profiler:
    """A profiler of this chunk; gradients go to scratch buffers."""
    scratch = {
        name: torch.zeros_like(parameter.detach(), dtype=torch.float32)
        for name, parameter in strands.module.named_parameters(remove_duplicate=False)
        if name in strands.chunk.parameters
    }
    executor = strands.executor(
        strands.sequential, {name: local(buffer) for name, buffer in scratch.items()}
    )
    for phase in executor.lowered:
        graph = strands.backward if phase == "backward" else strands.chunk.forward
        executor.lowered[phase] = lower(
            {phase: graph}, strands.op_graphs[phase].order, late_waits=False
        )
    return Profiler(strands, executor, batch, device_type)


def profile_strands(
    strands: Strands, batch: Batch, device_type: str, *, repeats: int, machine: str
) -> CostTable:
    """What a training run measures at start-up: every operator and collective alone, and how
    much the kinds that take most of the time slow each other down. Collective."""
    profiler = open_profiler(strands, batch, device_type)
    table = measure(
        profiler.run_once,
        profiler.graphs,
        repeats=repeats,
        machine=machine,
        graph_digest=strands.digest,
    )
    return replace(table, pairs=_notable_pairs(profiler, table))


def _notable_pairs(profiler: Profiler, table: CostTable) -> tuple[PairCost, ...]:
    compute = longest(profiler.graphs, table, collectives=False, notable=NOTABLE)
    transfers = longest(profiler.graphs, table, collectives=True, notable=NOTABLE)
    if not transfers:
        return ()
    inputs = profiler.capture([*compute.values(), *transfers.values()])
    return tuple(
        measure_pair(
            profiler.device_type,
            inputs.compute[key],
            inputs.collectives[other],
            budget_ns=START_UP_BUDGET_NS,
        )
        for key in compute.values()
        for other in transfers.values()
    )


def longest(
    graphs: Mapping[str, OpGraph], table: CostTable, *, collectives: bool, notable: float = 0.0
) -> dict[tuple[Kind, str], str]:
    """By kind and lane the key on which a step spends most time, of kinds with at least the
    share `notable` of all time spent on compute, or on collectives."""
    ops = [op for graph in graphs.values() for op in graph.operators]
    ops = [op for op in ops if op.is_collective == collectives]
    count = Counter(op.key for op in ops)
    total_ns = {key: count[key] * table.operators[key].solo_ns for key in count}
    keys: dict[tuple[Kind, str], set[str]] = {}
    for op in ops:
        keys.setdefault((op.kind, op.lane), set()).add(op.key)
    least_ns = notable * sum(total_ns.values())
    return {
        of: max(sorted(found), key=total_ns.__getitem__)
        for of, found in sorted(keys.items())
        if sum(total_ns[key] for key in found) >= least_ns
    }
