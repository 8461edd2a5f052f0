"""What the schedule of a layout does, found from its actions; kept by its name, as thousands of
layouts share a few."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from interlace.errors import InputError
from interlace.ir.actions import Action, Share
from interlace.ir.phase_numbers import PhaseNumbers
from interlace.ir.stage_messages import chain, chunks_of
from interlace.schedules.finder import find
from interlace.sim.listed_actions import ListedActions, most_kept
from interlace.sim.pipeline_costs import ChunkCosts
from interlace.strategy.job_layout import JobLayout

Actions = tuple[tuple[Action, ...], ...]
_NOTHING = ChunkCosts(forward_ns=0, input_ns=0, weight_ns=0)
FULL = 3
"""After so many micro-batches for each rank of a pipeline, or those behind which it says that it
settles if they are fewer, a schedule keeps no more forwards (`eager_folded` nearly no more), and
each further one adds as many actions of two strands as a rank has chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """Of all ranks of a pipeline, in a step of `micro_batches`."""

    micro_batches: int
    """As many as the layout has, or enough to show what all others do."""
    rank_of: Mapping[int, int]
    """By chunk."""
    kept: tuple[int, ...]
    """By rank: most forwards whose values are kept at a time, as `sim.pipeline_step` counts."""
    pairs: tuple[int, ...]
    """By rank: how many actions run two strands."""
    cuts_backwards: bool
    """Whether gradients of weights are run apart."""
    chunks_of: tuple[tuple[int, ...], ...]
    """By rank, in their order."""

    @property
    def interleaves(self) -> bool:
        """Whether two strands run side by side anywhere."""
        return any(self.pairs)


def facts_of(layout: JobLayout) -> ScheduleFacts:
    """Raises InputError if the schedule cannot run so."""
    ranks, count = layout.pipeline, layout.micro_batches
    if rounds := settles(layout.schedule):
        count = min(count, min(FULL, rounds) * ranks + 1)
    return _facts(layout.schedule, ranks, count)


def few_facts_of(layout: JobLayout) -> ScheduleFacts:
    """Those of as few micro-batches as the schedule runs, with as many actions of two strands as
    there could be. What ranks keep in longer steps it does not say. Raises InputError if the
    schedule cannot run so."""
    name, ranks = layout.schedule, layout.pipeline
    found = _of_few(name, ranks)
    if not settles(name) or _facts(name, 2, 2 * FULL).interleaves:
        most = found.micro_batches * chunks_on_a_rank(name)
        found = replace(found, pairs=(most,) * ranks)
    return found


@lru_cache(maxsize=256)
def _of_few(name: str, ranks: int) -> ScheduleFacts:
    try:
        return _facts(name, ranks, 1)
    except InputError:  # groups of micro-batches, one for each rank
        return _facts(name, ranks, ranks)


def interleaves(layout: JobLayout) -> bool:
    """Whether it runs two strands side by side. Raises InputError if the schedule cannot run so."""
    return facts_of(layout).interleaves


@lru_cache(maxsize=64)
def schedule_actions(name: str, ranks: int, micro_batches: int) -> Actions:
    """The actions of all ranks. Raises InputError if the schedule does not run so."""
    return find(name).of_ranks(ranks, micro_batches)


@lru_cache(maxsize=64)
def listed_actions(name: str, ranks: int, micro_batches: int) -> ListedActions:
    """The same in an order in which they can run."""
    actions = schedule_actions(name, ranks, micro_batches)
    return ListedActions(actions, chain(1 + max(chunks_of(actions))))


@lru_cache(maxsize=256)
def chunks_on_a_rank(schedule: str) -> int:
    """On average."""
    return find(schedule).chunks


@lru_cache(maxsize=256)
def settles(schedule: str) -> int:
    """Behind how many micro-batches for each rank, as it declares; 0 if that is not known."""
    return find(schedule).declared.settles


@lru_cache(maxsize=2048)
def _facts(schedule: str, ranks: int, micro_batches: int) -> ScheduleFacts:
    # Not proved: what is simulated is.
    actions = find(schedule).unproved(ranks, micro_batches, chunks_on_a_rank(schedule))
    phases = PhaseNumbers(actions)
    pairs = [len(action.slots) > 1 for action in phases.actions]
    rank_of = phases.rank_of
    chunks = sorted(rank_of)
    return ScheduleFacts(
        micro_batches=micro_batches,
        rank_of=rank_of,
        kept=tuple(forwards for _, forwards in most_kept(phases, [_NOTHING] * len(chunks))),
        pairs=tuple(sum(pairs[phase] for phase in own) for own in phases.of_ranks),
        cuts_backwards=any(
            slot.strand.share == Share.WEIGHT for each in phases.actions for slot in each.slots
        ),
        chunks_of=tuple(tuple(c for c in chunks if rank_of[c] == rank) for rank in range(ranks)),
    )
