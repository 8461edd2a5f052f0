"""Profile a chunk: operators alone in a real step, and what kinds that overlap do to each other.

Collective: all ranks measure the same things in the same order, which follows from the graphs and
from times that they have agreed on.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.graphs.dropout import seeds_for
from interlace.ir.actions import Share, strand
from interlace.ir.costs import CostTable, PairCost
from interlace.ir.graph import Kind, OpGraph
from interlace.ir.noise import excess_of_oef, excess_of_spread
from interlace.ir.timeline import Timeline
from interlace.measure.alone import measure
from interlace.measure.operands import Capture
from interlace.measure.pairs import beside_ns, in_a_row_ns, measure_pair, quickest_ns
from interlace.measure.repeats import least_noisy
from interlace.runtime.executor import Batch, StepExecutor, lower_plan
from interlace.runtime.recorder import Clock, Recorder, clock_for
from interlace.runtime.traced_strands import Strands

NOTABLE = 0.1
"""A kind with a smaller share of a step's compute or communication gets no pair at start-up; a
choice."""
NOTABLE_KEY = 0.02
"""Collectives with a smaller share of a step's communication keep the times that they had in the
profiled step (`on_busy_links`); a choice."""
QUEUED = 0.15
"""Share of a long transfer for which a short one, started at any moment of it, has to wait at least
if both stand in one queue; a choice. Behind all that is left of it that would be 0.4 on average;
links that send packets of both in turn delay the short one by as much as it takes itself."""
PACKET_BYTES = 1500
"""What Ethernet sends at once: a message up to this has no time of its own on a link, only its
place in the queue."""
START_UP_BUDGET_NS = 100e6
"""Time, in ns, for one pair at start-up; a choice. `pairs.FEWEST_ROUNDS` are run in any case."""


@dataclass(frozen=True)
class Profiler:
    """A chunk whose operators run one after the other, each collective waited for at once."""

    strands: Strands
    executor: StepExecutor
    batch: Batch
    clock: Clock
    """Keeps the streams on which it stamps collectives over all measurements."""

    @property
    def graphs(self) -> dict[str, OpGraph]:
        """Those of the strands."""
        return dict(self.strands.op_graphs)

    @property
    def batches(self) -> list[Batch]:
        """One micro-batch, or two if the ends of a step have graphs of their own."""
        has_ends = any(strand(name).share == Share.END for name in self.strands.parts)
        return [self.batch] * (2 if has_ends else 1)

    def run_once(self) -> Timeline:
        """Every graph once, recorded."""
        recorder = Recorder(self.strands.op_graphs, self.clock.restarted())
        self.executor.step(self.batches, recorder)
        return recorder.timeline("profile", 0, own_names=True)

    def capture(self, keys: Iterable[str]) -> Capture:
        """What the first operator of each of these keys is called with in a step."""
        capture = Capture(self.strands.op_graphs, self.clock.restarted(), wanted=frozenset(keys))
        self.executor.step(self.batches, capture)
        return capture


def open_profiler(
    strands: Strands,
    batch: Batch,
    device_type: str,
    constants: Mapping[tuple[str, str], Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    ahead: bool = False,
) -> Profiler:
    """A profiler of this chunk on the ranks of `group`. Gradients go to scratch copies of those in
    `constants`; a rank of a pipeline has none for the weights of other stages. With `ahead` times
    are those of a device that never waits for the host, as in a CUDA graph."""
    device = next(iter(constants.values())).device
    scratch = {
        (binding.role, binding.target): zeros_for(node.meta["val"], device)
        for part in strands.parts.values()
        for node, binding in part.inputs.items()
        if "gradient" in binding.role
    }
    scratch |= {key: tensor for key, tensor in constants.items() if "gradient" not in key[0]}
    if strands.takes_seeds:
        batch = (*batch, seeds_for(0, step=0, micro_batch=0))
    executor = strands.executor(strands.sequential, scratch)
    executor.lowered = lower_plan(strands.parts, strands.sequential, late_waits=False)
    return Profiler(strands, executor, batch, clock_for(device_type, group, ahead=ahead))


def zeros_for(like: Tensor, device: torch.device) -> Tensor:
    """Zeros that lie in memory like a fake tensor."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).zero_()


def profile_strands(
    strands: Strands,
    batch: Batch,
    device_type: str,
    constants: Mapping[tuple[str, str], Tensor],
    *,
    repeats: int,
    machine: str,
    group: dist.ProcessGroup | None = None,
    ahead: bool = False,
) -> CostTable:
    """What a training run measures at start-up: every operator and collective alone, and how
    much the kinds that take most of the time slow each other down. What is noisy is measured
    again, a few times. Collective on `group`, the ranks that run these graphs; `ahead` as of
    `open_profiler`."""
    profiler = open_profiler(strands, batch, device_type, constants, group, ahead=ahead)

    def alone() -> CostTable:
        return measure(
            profiler.run_once,
            profiler.graphs,
            repeats=repeats,
            machine=machine,
            graph_digest=strands.digest,
            group=group,
        )

    table = least_noisy(alone, excess_of_spread)
    table = on_busy_links(profiler, table)
    return replace(table, pairs=_notable_pairs(profiler, table))


def on_busy_links(profiler: Profiler, table: CostTable) -> CostTable:
    """`table` with what transfers take on a link that is in use, as it is under a plan. In the
    profiled step each follows compute, after which a shaped link lets its bucket pass at once:
    512 KiB at 350 Mbit/s took 10.8 ms after a pause, and 12.5 ms behind another. What takes little
    of a step, or fits a packet, and is of another lane than most, may stand behind the others'
    messages: counts of rows for experts took 9 to 11 ms under a plan, and 2 ms alone. Collective.
    """
    ops = [op for graph in profiler.graphs.values() for op in graph.operators if op.is_collective]
    count = Counter(op.key for op in ops)
    total_ns = {key: count[key] * table.operators[key].solo_ns for key in count}
    least_ns = NOTABLE_KEY * sum(total_ns.values())
    keys = [key for key in sorted(total_ns) if total_ns[key] >= max(1, least_ns)]
    if not keys:
        return table
    most = max(keys, key=total_ns.__getitem__)
    lane = {op.key: op.lane for op in ops}
    packet = {op.key for op in ops if max(op.bytes_in, op.bytes_out) <= PACKET_BYTES}
    others = {key for key in lane if lane[key] != lane[most]}
    small = sorted((others & packet) | (others - set(keys)))
    calls = profiler.capture([*keys, *small]).collectives
    in_a_row = {key: in_a_row_ns(profiler.clock, calls[key]) for key in keys if key not in packet}
    behind = {key: ns - table.operators[key].solo_ns for key, ns in in_a_row.items()}
    beside = {key: beside_ns(profiler.clock, calls[most], calls[key]) for key in small}
    waits = {key: beside[key] - quickest_ns(profiler.clock, calls[key]) for key in small}
    all_small = {lane[key] for key in small} - {lane[key] for key in set(lane) - set(small)}
    queued = {
        name for name in all_small
        if all(waits[k] >= QUEUED * table.operators[most].solo_ns for k in small if lane[k] == name)
    }  # fmt: skip
    apart = {key: ns for key, ns in beside.items() if lane[key] not in queued}
    operators = {
        key: replace(cost, solo_ns=max(cost.solo_ns, apart.get(key, 0)))
        for key, cost in table.operators.items()
    }
    return replace(
        table,
        operators=operators,
        queues=dict.fromkeys(sorted(queued), lane[most]),
        behind_ns={key: ns for key, ns in behind.items() if ns > 0},
    )


def _notable_pairs(profiler: Profiler, table: CostTable) -> tuple[PairCost, ...]:
    compute = longest(profiler.graphs, table, collectives=False, notable=NOTABLE)
    transfers = longest(profiler.graphs, table, collectives=True, notable=NOTABLE)
    if not transfers:
        return ()
    inputs = profiler.capture([*compute.values(), *transfers.values()])

    def pair(key: str, other: str) -> PairCost:
        return measure_pair(
            profiler.clock,
            inputs.compute[key],
            inputs.collectives[other],
            budget_ns=START_UP_BUDGET_NS,
        )

    return tuple(
        least_noisy(partial(pair, key, other), excess_of_oef)
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
