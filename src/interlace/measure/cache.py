"""Measured times that later runs on this machine take: kept in files, if they can be trusted."""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from interlace.errors import InputError
from interlace.ir import store
from interlace.ir.costs import CostTable
from interlace.ir.noise import noise_of
from interlace.ranks.small_collectives import broadcast_text, is_first_rank

Say = Callable[[str], None]


def cached(
    directory: Path | None,
    machine: str,
    graph_digest: str,
    measure_now: Callable[[], CostTable],
    *,
    say: Say,
    group: dist.ProcessGroup | None = None,
) -> CostTable:
    """The table of an earlier run on this machine and graph, or a fresh one, which is then kept.

    A file that cannot be used counts as absent. Noisy times are not kept, and not taken from a
    file. `say` is told of either on the first rank, in one line. Without `directory` nothing is
    read or kept. Collective, on the default group if none is given: the first rank reads and gives
    what it finds to all, so that ranks never mix old and new times.
    """
    path = directory / f"{graph_digest}-{machine}.json" if directory else None
    text = ""
    if path is not None and is_first_rank(group):
        found, problem = _read(path, machine, graph_digest)
        text = store.dumps(found) if found else ""
        if problem:
            say(f"{problem}; measuring again")
    text = broadcast_text(text, group)
    if text:
        return store.loads(text, CostTable, "the first rank's table")
    table = measure_now()
    if is_first_rank(group):
        _keep(table, path, say)
    return table


def _read(path: Path, machine: str, graph_digest: str) -> tuple[CostTable | None, str]:
    """(the table in a file, why it cannot be used); a file that is not there needs no reason."""
    try:
        found = store.load(path, CostTable)
    except InputError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None, ""
        reason = error.message if str(path) in error.message else f"{path}: {error.message}"
        return None, f"measured times are not taken from the cache: {reason}"
    if (found.machine, found.graph_digest) != (machine, graph_digest):
        return None, f"measured times are not taken from the cache: {path} is of another graph"
    reasons = noise_of(found)
    if reasons:
        return None, f"the times in {path} are noisy ({'; '.join(reasons)})"
    return found, ""


def _keep(table: CostTable, path: Path | None, say: Say) -> None:
    reasons = noise_of(table)
    if reasons:
        kept = "" if path is None else "; they are not kept, and the next run measures again"
        say(
            f"warning: the measured times are noisy, so the plan may be a poor one: "
            f"{'; '.join(reasons)}{kept}"
        )
    elif path is not None:
        try:
            store.save(table, path)
        except OSError as error:
            say(f"the measured times are not kept: {path}: {error.strerror or error}")
