"""Proves that a profile measures a whole run on real processes, alike on all ranks, and resumes."""

import json
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from strand_world import Case, bits, open_world
from torch.distributed.device_mesh import init_device_mesh
from training import LIMIT_S, Workplace, send

from interlace.graphs.collectives import TABLE
from interlace.ir import store
from interlace.ir.costs import CostTable
from interlace.ir.graph import Operator
from interlace.measure.operands import CollectiveCall
from interlace.measure.pairs import measure_lanes, time_transfer
from interlace.measure.start_up import open_profiler, profile_strands
from interlace.runtime.recorder import HostClock

SMALL = ("--model.layers", "1", "--plan.profile_repeats", "1")
"""How much is measured and how often does not matter where a profile ends and goes on."""


def start_up() -> dict[str, Any]:
    """A child: what a training run measures before its first step."""
    with gloo_group():
        world = open_world(Case(), 2)
        before = {name: bits(master) for name, master in world.weights.masters.items()}
        batch = world.case.batches(0)[0]
        table = profile_strands(
            world.strands, batch, "cpu", world.constants, repeats=3, machine="test"
        )
        after = {name: bits(master) for name, master in world.weights.masters.items()}
        gradients = [float(buffer.abs().max()) for buffer in world.buffers.values()]
        graphs = [world.strands.op_graphs[name] for name in ("forward", "backward")]
    return {
        "table": store.dumps(table),
        "untouched": before == after and not any(gradients),
        "keys": sorted({op.key for graph in graphs for op in graph.operators}),
        "graph": world.strands.digest,
        "pair times": sorted(table.of(world.strands.pair).values()),
    }


@pytest.fixture(scope="module")
def of_start_up() -> list[dict[str, Any]]:
    return [result.value for result in run_ranks("test_profile:start_up", 2, timeout_s=100)]


def test_a_start_up_profile_is_complete_and_the_same_on_all_ranks(
    of_start_up: list[dict[str, Any]],
) -> None:
    """Every key has a time, notable kinds have slow-downs; weights and gradients stay the same."""
    first, second = of_start_up
    assert first["table"] == second["table"]
    table = store.loads(first["table"], CostTable, "the table")
    assert sorted(table.operators) == first["keys"]
    assert table.graph_digest == first["graph"]
    assert first["pair times"][0] > 0
    assert table.issue_ns > 0
    assert table.pairs
    assert all(pair.compute_ns and pair.transfer_ns and pair.pair_ns for pair in table.pairs)
    assert table.contention.factors
    assert first["untouched"]
    assert second["untouched"]


def captured() -> dict[str, Any]:
    """A child: what the inputs of captured operators are, and what calling them again does."""
    with gloo_group():
        world = open_world(Case(), 2)
        profiler = open_profiler(world.strands, world.case.batches(0)[0], "cpu", world.constants)
        keys = {op.key for graph in profiler.graphs.values() for op in graph.operators}
        capture = profiler.capture(keys)
        inputs = [a for call in capture.compute.values() for a in call.args]
        tensors = [a for a in inputs if isinstance(a, torch.Tensor) and a.is_floating_point()]
        before = [bits(call.x) for call in capture.collectives.values()]
        with torch.no_grad():
            for call in capture.compute.values():
                call()
                call()
        for call in capture.collectives.values():
            for start in call.starts(2):
                start().work.wait()
        return {
            "captured": sorted([*capture.compute, *capture.collectives]),
            "keys": sorted(keys),
            "finite": all(bool(t.isfinite().all()) for t in tensors),
            "all zero": sum(not bool(t.any()) for t in tensors) / len(tensors),
            "inputs kept": before == [bits(call.x) for call in capture.collectives.values()],
        }


def test_operators_are_measured_on_the_data_of_a_step() -> None:
    """Each distinct operator is captured with its inputs, and collectives leave theirs alone.

    Only sums of gradients start from zeros.
    """
    for result in run_ranks("test_profile:captured", 2, timeout_s=100):
        facts = result.value
        assert facts["captured"] == facts["keys"]
        assert facts["finite"]
        assert facts["all zero"] < 0.3
        assert facts["inputs kept"]


def two_lanes() -> dict[str, Any]:
    """A child of four: a 2 x 2 mesh with a group per axis."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        calls = []
        functional = torch.ops._c10d_functional
        for lane, target, rest in (
            ("dp", functional.reduce_scatter_tensor.default, ("sum", 2)),
            ("tp", functional.all_gather_into_tensor.default, (2,)),
        ):
            row = TABLE[target]
            op = Operator(lane, row.kind, "c", lane, (), (), lane, 2**16, 2**17, 0)
            group = mesh.get_group(lane).group_name
            x = torch.full((2**14,), float(dist.get_rank()))
            calls.append(CollectiveCall(op, x, (*rest, group), row))
        resized = calls[1].resized(2**20 + 3)
        summed = calls[0].starts(1)[0]()
        summed.work.wait()
        both = measure_lanes(HostClock(), *calls, budget_ns=20e6)
        return {
            "together": asdict(both),
            "transfer ns": time_transfer(HostClock(), resized, budget_ns=10e6),
            "full bytes": resized.full_bytes,
            "sum": float(summed.output[0]),
            "rank": dist.get_rank(),
        }


def test_two_lanes_are_measured_together() -> None:
    """Groups of two axes at once; the ranks agree on all times, and the collectives are real."""
    facts = [result.value for result in run_ranks("test_profile:two_lanes", 4, timeout_s=100)]
    for each in facts:
        assert each["together"] == facts[0]["together"]
        assert each["transfer ns"] == facts[0]["transfer ns"] > 0
        assert 2**20 + 3 <= each["full bytes"] < 2**20 + 3 + 8
        assert each["sum"] == each["rank"] % 2 * 2 + 2  # over dp: ranks r and r + 2
    together = facts[0]["together"]
    assert (together["first"], together["second"]) == ("dp", "tp")
    assert min(together["first_ns"], together["second_ns"], together["pair_ns"]) > 0


def kept(path: Path) -> dict[str, Any]:
    """The cost file so far; it appears whole or not at all."""
    return json.loads(path.read_text())


def test_a_killed_profile_continues(tmp_path: Path) -> None:
    """What was measured before SIGKILL stays bit for bit; then the file is complete and current."""
    place = Workplace(tmp_path)
    words = ("profile", "run.toml", "-o", "cost.json", *SMALL)
    partial, output = tmp_path / "cost.json.partial", tmp_path / "cost.json"
    with place.start(*words).running() as command:
        deadline = time.monotonic() + LIMIT_S
        while not (partial.exists() and len(kept(partial)["pairs"]) >= 2):
            assert command.process.poll() is None, command.said()
            assert time.monotonic() < deadline, command.said()
            time.sleep(0.02)
        command.look()
        send(command.rank(0), signal.SIGKILL)
        code, said = command.end()
        assert code == 1, said
    before = kept(partial)
    assert not output.exists()

    said = place.interlace(*words)
    after = kept(output)
    assert not partial.exists()
    assert after["operators"] == before["operators"]
    assert after["pairs"][: len(before["pairs"])] == before["pairs"]
    table = store.load(output, CostTable)
    transfers = {(c.kind, c.lane) for c in table.operators.values() if c.lane != "compute"}
    kinds = {cost.kind for cost in table.operators.values() if cost.lane == "compute"}
    assert len(table.pairs) == len(kinds) * len(transfers)
    assert {(fit.kind, fit.lane) for fit in table.fits} == transfers
    assert len(table.compute_pairs) == len(kinds)
    assert "overlap effectiveness" in said

    quiet = replace(
        table,
        operators={key: replace(cost, spread_ns=0) for key, cost in table.operators.items()},
        pairs=tuple(replace(pair, oef=0.5) for pair in table.pairs),
        fits=tuple(replace(fit, latency_ns=1.0, ns_per_byte=1e3, largest_error=0.0)
                   for fit in table.fits),
        compute_pairs=tuple(replace(p, pair_ns=p.first_ns + p.second_ns)
                            for p in table.compute_pairs),
    )  # fmt: skip
    store.save(quiet, output)  # whatever else ran on this machine: only noise is measured again
    after = kept(output)
    assert "is current" in place.interlace(*words)
    assert kept(output) == after
    refused = place.interlace(*words, "--model.width", "32", code=2)
    assert "cost.json was measured for graph" in refused
    assert kept(output) == after


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    """Exit code 130, the partial file is there, and a partial file of another run is refused."""
    place = Workplace(tmp_path)
    words = ("profile", "run.toml", "-o", "cost.json", *SMALL)
    with place.start(*words).running() as command:
        command.wait_for("by size")
        send(psutil.Process(command.process.pid), signal.SIGINT)
        code, said = command.end()
    assert code == 130, said
    assert "stopped by SIGINT" in said
    assert kept(tmp_path / "cost.json.partial")["operators"]
    refused = place.interlace(*words, "--model.width", "32", code=2)
    assert "cost.json.partial was measured for graph" in refused
    assert "--again" in refused
