"""The graphs among which a step chooses: decomposed or whole, in one chunk or folded.

Either all passes of a step run decomposed, or only the first forward and the last backward. Two
strands hide a collective of one under the other without slices, and slices cost time: the matmul of
each packs or loads the weight again, 5 to 7 % of a matmul in slices of 128 rows on a CPU. The ends
of a step have no other strand beside them, and there decomposition hides what nothing else can.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from interlace.config import Passes
from interlace.decompose.rewrite.apply import Decompose
from interlace.errors import InputError
from interlace.ir.actions import Direction, Share, Strand, steady_phase
from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.plan import Plan
from interlace.parallel.data import DataLayout
from interlace.runtime.chunks import Placement, in_chunks, one_rank
from interlace.runtime.traced_strands import FORWARD, Strands
from interlace.schedules.finder import Schedule
from interlace.schedules.stage import StageSchedule
from interlace.search.planner import make_plan
from interlace.search.problem import MemoryLimits
from interlace.sim.simulated_step import simulate_step

LEAST_GAIN = 0.03
"""Share of its time that a phase of two strands must be predicted to gain before slices run there
too. A choice: what slicing costs beside the times that were measured, such as caches that two
strands share, is not predicted."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The graphs among which a run chooses."""

    plain: Strands | None
    """Nothing decomposed; None if nobody asked for it."""
    all: Strands
    """Every pass as `[overlap]` asks for."""
    ends: Strands | None
    """The ends of a step like `all`, the other passes `plain`; None if that is no choice. If it was
    to be one, the listing of `all` says why not."""

    @property
    def whole(self) -> Strands:
        """Graphs with every operator of all of them."""
        return self.ends or self.all

    def made_for(self, plan: Plan) -> Strands:
        """The graphs that `plan` orders; if it orders others, those without choice."""
        if self.ends is not None and plan.graph_digest == self.ends.digest:
            return self.ends
        return self.all


def trace_candidates(
    trace: Callable[[Decompose | None], Strands],
    decompose: Decompose | None,
    passes: Passes,
    *,
    schedule: Schedule,
    plain: bool = False,
    split_at: Sequence[str] = (),
    data: DataLayout | None = None,
) -> Candidates:
    """What can be chosen for a run by this schedule; with `plain` graphs where nothing is
    decomposed are among them in any case. `trace` is called once or twice, on all ranks alike.
    `split_at` names the sub-modules with which chunks begin, but the first; `data` says how the
    ranks of a stage share weights that they gather for each pass.

    Raises InputError if the ends alone cannot run decomposed and `passes` asks for it."""
    if schedule.chunks > 1 or schedule.cuts_backwards or not schedule.is_alone:
        placement = replace(_placement(schedule, split_at), data=data)
        return _folded(trace, decompose, passes, schedule, placement, plain=plain)
    if split_at:
        raise InputError(
            f"split_at names {len(split_at)} sub-modules, and schedule {schedule.name!r} has one "
            "chunk",
            hint="take a schedule with chunks, such as folded",
        )
    everywhere = trace(decompose)
    if decompose is None or everywhere.listing is None or not everywhere.listing.decomposed:
        return Candidates(plain=everywhere, all=everywhere, ends=None)
    by_times = passes == "auto" and decompose.request.variant == "auto" and schedule.interleaves
    wanted = passes == "ends" or by_times
    whole = trace(None) if wanted or plain else None
    if whole is None or not wanted:
        return Candidates(plain=whole, all=everywhere, ends=None)
    misfit = _misfit(whole, everywhere)
    if misfit and passes == "ends":
        raise InputError(
            f'overlap.passes = "ends", but {misfit} in decomposed graphs',
            hint='set overlap.passes to "all"',
        )
    if misfit:
        listing = replace(everywhere.listing, misfit=f"{misfit} in decomposed graphs")
        return Candidates(plain=whole, all=replace(everywhere, listing=listing), ends=None)
    return Candidates(plain=whole, all=everywhere, ends=with_ends(whole, everywhere))


def _folded(
    trace: Callable[[Decompose | None], Strands],
    decompose: Decompose | None,
    passes: Passes,
    schedule: Schedule,
    placement: Placement,
    *,
    plain: bool,
) -> Candidates:
    """Graphs in chunks, of which the ends of a step have none of their own."""
    if passes == "ends" and decompose is not None:
        raise InputError(
            f'overlap.passes = "ends", but schedule {schedule.name!r} runs {schedule.chunks} '
            "chunks on a rank",
            hint='set overlap.passes to "all"',
        )
    everywhere = in_chunks(trace(decompose), placement)
    whole = everywhere
    if plain and decompose is not None:
        whole = in_chunks(trace(None), placement)
    return Candidates(plain=whole, all=everywhere, ends=None)


def _placement(schedule: Schedule, split_at: Sequence[str]) -> Placement:
    if isinstance(schedule, StageSchedule):
        return Placement(
            rank_of=schedule.rank_of, rank=schedule.rank, halves=schedule.cuts_backwards,
            split_at=tuple(split_at),
        )  # fmt: skip
    return one_rank(schedule.chunks, halves=schedule.cuts_backwards, split_at=split_at)


def with_ends(plain: Strands, decomposed: Strands) -> Strands:
    """`plain` with the first forward and the last backward of a step as in `decomposed`."""
    graphs, parts, op_graphs = dict(plain.graphs), dict(plain.parts), dict(plain.op_graphs)
    for direction in Direction:
        whole, end = Strand(direction).graph, Strand(direction, share=Share.END).graph
        graphs[end] = decomposed.graphs[whole]
        parts[end] = decomposed.parts[whole]
        op_graphs[end] = decomposed.op_graphs[whole]
    listing = decomposed.listing
    if listing is not None:
        listing = replace(listing, passes="ends")
    return replace(plain, graphs=graphs, parts=parts, op_graphs=op_graphs, listing=listing)


def _misfit(plain: Strands, decomposed: Strands) -> str:
    """What a forward hands over in another form, so that the other backward cannot take it."""
    if plain.saved != decomposed.saved:
        return "other values are kept for the backward"
    ours, theirs = (strands.graphs[FORWARD].outputs for strands in (plain, decomposed))
    for name, one, other in zip(("loss", *plain.saved), ours, theirs, strict=True):
        a, b = one.meta["val"], other.meta["val"]
        if (a.shape, a.dtype) != (b.shape, b.dtype) or a.stride() != b.stride():
            return f"{name} is laid out in another way"
    return ""


def choose_passes(candidates: Candidates, costs: CostTable, limits: MemoryLimits) -> Strands:
    """The faster graphs by these times. Decomposed passes beside another strand must be predicted
    to gain `LEAST_GAIN`; one strand that hides all its communication by slices counts too, as a
    trial may go back to it. `costs` are those of `candidates.whole`, equal on all ranks."""
    ends, everywhere = candidates.ends, candidates.all
    if ends is None:
        return everywhere
    one_ns = simulate_step(everywhere.sequential, everywhere.op_graphs, costs, 1).length_ns
    sliced_ns = min(one_ns, _pair_ns(everywhere.op_graphs, costs, limits) or one_ns)
    whole_ns = _pair_ns(ends.op_graphs, costs, limits)
    is_faster = whole_ns is None or sliced_ns < (1 - LEAST_GAIN) * whole_ns
    return everywhere if is_faster else ends


def _pair_ns(graphs: Mapping[str, OpGraph], costs: CostTable, limits: MemoryLimits) -> int | None:
    """The steady state of two strands by list scheduling; None if memory allows none."""
    try:
        phases = make_plan(graphs, costs, "list", limits=limits).phases
        return phases[steady_phase(phases)].predicted_ns
    except InputError:
        return None
