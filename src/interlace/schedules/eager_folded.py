"""Eager folded: the W shape with more downs ahead, so that transfers run beside compute, as eager
1F1B does for 1F1B. Our own.

A down or an up takes FB where two strands run, and its two messages c from rank to rank. Let rank r
run a(r) downs before its first up, one more than the next rank or two more. From rank i to rank k
and back goes a loop of k - i + 1 downs and ups and 2 (k - i) hops, which moves on by a(i) - a(k) +
1 micro-batches, so the period of a down and an up is

    max over i <= k of (2 (k - i + 1) FB + 2 (k - i) c) / (a(i) - a(k) + 1)

In `folded` all steps are single and it is 2 FB + 2 c (p - 1) / p. Where all are double it is 2 FB
while c <= FB, for 2 a(0) + 1 chunks of memory on each rank; between these, runs of single steps are
kept short, as the longest one decides.
"""

from itertools import accumulate

from interlace.errors import InputError
from interlace.ir.actions import Action
from interlace.schedules.declared import AS_SHORT, Options, declare
from interlace.schedules.folded import w_shape
from interlace.schedules.rank_writer import need_chunks


def _depths(ranks: int) -> tuple[Options, ...]:
    return tuple({"depth": depth} for depth in range(ranks, 2 * ranks))


def _for_times(ranks: int, pair_ns: float, hop_ns: float) -> Options:
    return {"depth": depth_for(ranks, pair_ns, hop_ns)}


@declare(settles=6, proposed=True, variants=_depths, for_times=_for_times)
def eager_folded(
    ranks: int, micro_batches: int, chunks: int = 2, depth: int | None = None
) -> tuple[tuple[Action, ...], ...]:
    """Rank r has the chunks r and 2p - 1 - r; rank 0 runs `depth` downs ahead, from p (`folded`) to
    2p - 1, which is the default. Raises InputError for another depth or number of chunks."""
    need_chunks("eager_folded", chunks, 2)
    depth = 2 * ranks - 1 if depth is None else depth
    if not ranks <= depth <= 2 * ranks - 1:
        raise InputError(
            f"eager_folded on {ranks} ranks cannot run {depth} steps ahead",
            hint=f"set depth to {ranks} to {2 * ranks - 1}",
        )
    ahead = _ahead(ranks, depth)
    return tuple(w_shape(rank, micro_batches, ahead) for rank in range(ranks))


def depth_for(ranks: int, pair_ns: float, hop_ns: float) -> int:
    """The least depth whose period is as good as the shortest, within 1 %. `hop_ns` is the time of
    both messages of a down or an up between two ranks, `pair_ns` that of a pair of passes."""
    periods = {d: period_ns(ranks, d, pair_ns, hop_ns) for d in range(ranks, 2 * ranks)}
    return min(depth for depth in periods if periods[depth] <= AS_SHORT * min(periods.values()))


def period_ns(ranks: int, depth: int, pair_ns: float, hop_ns: float) -> float:
    """How much longer a step of one more micro-batch is."""
    ahead = _ahead(ranks, depth)
    return max(
        2 * ((k - i + 1) * pair_ns + (k - i) * hop_ns) / (ahead[i] - ahead[k] + 1)
        for i in range(ranks)
        for k in range(i, ranks)
    )


def _ahead(ranks: int, depth: int) -> list[int]:
    """How many downs each rank runs before its first up: one on the last rank, `depth` on rank
    0."""
    doubles = depth - ranks
    run, longer = divmod(ranks - 1 - doubles, doubles + 1)
    steps: list[int] = []
    for number in range(doubles + 1):
        steps += [1] * (run + (number < longer)) + [2] * (number < doubles)
    return list(accumulate(reversed(steps), initial=1))[::-1]
