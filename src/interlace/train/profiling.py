"""`interlace profile`: measure a run's operators, links and pairs on this machine, resumably.

The file that grows while measuring is a CostTable like the finished one. What it already holds is
not measured again, and all ranks work through the same list, which follows from the graph.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from interlace.config import CompareConfig, RunConfig
from interlace.errors import InputError
from interlace.ir import store
from interlace.ir.costs import CostTable, shared_links
from interlace.ir.noise import excess_of_spread, noise_of, without_noise
from interlace.ir.timeline import Timeline
from interlace.lab.links import link_label
from interlace.measure.alone import measure
from interlace.measure.everything import Measurement, measurements
from interlace.measure.machine import machine_id
from interlace.measure.repeats import least_noisy
from interlace.measure.start_up import Profiler, on_busy_links, open_profiler
from interlace.ranks.agree import check_agreement
from interlace.ranks.signals import StopFlag, agreed
from interlace.ranks.small_collectives import broadcast_text, is_first_rank, largest
from interlace.report.cost_tables import cost_summary
from interlace.start_progress import shown
from interlace.train.opening import open_graphs
from interlace.train.worker import run_rank

STOPPED = 130
"""Exit code after Ctrl-C, 128 + SIGINT, as shells give it."""
FEWEST_PASSES, MOST_PASSES = 5, 40
PASSES_BUDGET_NS = 5e9
"""Time for the steps in which every operator is measured alone."""

TRACED = 3
"""Stages before anything is measured, as a bar counts them: data, model, trace."""

ProfileProgress = Callable[[str, int, int], None]
"""Called as (what is measured now, measurements done, of how many)."""


@dataclass(frozen=True, slots=True)
class Files:
    """Where a profile is written, and whether what is there is to be replaced."""

    output: Path
    again: bool

    @property
    def partial(self) -> Path:
        """What was measured so far; removed when the output is written."""
        return self.output.with_name(self.output.name + ".partial")


class _Stopped(Exception):
    """All ranks were asked to stop."""


def profile_command(
    config: RunConfig, output: Path, *, again: bool, progress: ProfileProgress
) -> int:
    """Be one rank of a profile of `config`, written to `output` by the first rank.

    Continues what an interrupted one left in OUTPUT.partial. An output that is current is left
    alone, and both are measured afresh with `again`. Raises InputError for files of other graphs
    or machines. Returns the exit code.
    """
    config = replace(config, strands="1", compare=CompareConfig(steps=0))  # one micro-batch will do
    return run_rank(config, partial(_profile, config, Files(output, again), progress))


def _profile(config: RunConfig, files: Files, progress: ProfileProgress, stop: StopFlag) -> int:
    with shown(TRACED) if is_first_rank() else nullcontext():
        setup, compilation, constants = open_graphs(config)
    strands = compilation.candidates.whole
    check_agreement({"data": setup.dataset.digest, "graph": strands.digest})
    machine = machine_id(setup.device.type, link_label(config.link))
    empty = CostTable(operators={}, source="profile", graph_digest=strands.digest, machine=machine)
    table, is_current = starting_point(files, empty)
    first = is_first_rank()
    if is_current:
        if first:
            print(cost_summary(table), file=sys.stderr)
            print(f"{files.output} is current; --again measures it again", file=sys.stderr)
        return 0
    batch = next(setup.dataset.batches(config.train.micro_batch_size))
    profiler = open_profiler(strands, setup.move(batch), setup.device.type, constants)
    try:
        table = _measure_all(profiler, table, files, progress, stop)
    except _Stopped:
        if first:
            kept = f"what was measured is kept in {files.partial}; run it again to continue"
            print(f"stopped by {stop.requested}; {kept}", file=sys.stderr)
        return STOPPED
    if first:
        store.save(table, files.output)
        files.partial.unlink(missing_ok=True)
        print(cost_summary(table), file=sys.stderr)
        print(files.output)
    return 0


def _measure_all(
    profiler: Profiler, table: CostTable, files: Files, progress: ProfileProgress, stop: StopFlag
) -> CostTable:
    todo: list[Measurement] = measurements(profiler, partial(_alone, profiler, stop))
    for index, each in enumerate(todo):
        progress(each.name, index, len(todo))
        if each.is_in(table):
            continue
        if agreed(stop, None):
            raise _Stopped
        table = each.add_to(table)
        if is_first_rank():
            store.save(table, files.partial)
    progress("done", len(todo), len(todo))
    return replace(table, links=shared_links(table.lane_pairs))


def _alone(profiler: Profiler, stop: StopFlag) -> CostTable:
    """Every operator and collective alone, in as many steps as the budget allows."""

    def run_once() -> Timeline:
        if agreed(stop, None):
            raise _Stopped
        return profiler.run_once()

    begin = time.perf_counter_ns()
    run_once()
    pass_ns = largest({"pass": time.perf_counter_ns() - begin})["pass"]
    repeats = min(MOST_PASSES, max(FEWEST_PASSES, int(PASSES_BUDGET_NS / max(pass_ns, 1))))

    def once() -> CostTable:
        graphs = profiler.graphs
        return measure(run_once, graphs, repeats=repeats, machine="", graph_digest="")

    return on_busy_links(profiler, least_noisy(once, excess_of_spread))


def starting_point(files: Files, empty: CostTable) -> tuple[CostTable, bool]:
    """(what is measured already, whether that is all), as the first rank finds it on disk.

    A mistake is raised on every rank alike.
    """
    answer: dict[str, str] = {}
    if is_first_rank():
        try:
            table, is_current = _found(files, empty)
            answer = {"table": store.dumps(table), "current": "yes" if is_current else ""}
        except InputError as error:
            answer = {"message": error.message, "hint": error.hint}
    answer = json.loads(broadcast_text(json.dumps(answer)))
    if "message" in answer:
        raise InputError(answer["message"], hint=answer["hint"])
    return store.loads(answer["table"], CostTable, "the first rank's table"), bool(
        answer["current"]
    )


def _found(files: Files, empty: CostTable) -> tuple[CostTable, bool]:
    if files.output.exists():
        table = store.load(files.output, CostTable)  # never replace what is no cost table
        if not files.again:
            _require_same(table, empty, files.output)
            return _trusted(table, files.output)
    if files.partial.exists() and not files.again:
        try:
            table = store.load(files.partial, CostTable)
        except InputError as error:  # of another version, say: what it holds is measured again
            print(f"{error.message}; starting afresh", file=sys.stderr)
            return empty, False
        _require_same(table, empty, files.partial)
        return table, False
    return empty, False


def _trusted(table: CostTable, path: Path) -> tuple[CostTable, bool]:
    """`table` without what is noisy in it, and whether that is all of it."""
    reasons = noise_of(table)
    if reasons:
        print(f"{path} is measured again in part: {'; '.join(reasons)}", file=sys.stderr)
    return without_noise(table), not reasons


def _require_same(table: CostTable, wanted: CostTable, path: Path) -> None:
    for what, theirs, ours in (
        ("graph", table.graph_digest, wanted.graph_digest),
        ("machine", table.machine, wanted.machine),
    ):
        if theirs != ours:
            raise InputError(
                f"{path} was measured for {what} {theirs or 'of no name'}, and this run has "
                f"{what} {ours}",
                hint="name another file with --output, or replace it with --again",
            )
