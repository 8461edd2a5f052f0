"""Proves that resharding between real processes gives exactly the slices of the full tensor.

One world per size runs hundreds of random pairs of layouts; every result is compared with
`torch.chunk` of the whole tensor, bit for bit, and every source must be unchanged.
"""

import random
import subprocess
import sys
from typing import Any

import pytest
from processes import gloo_group, run_ranks

pytestmark = pytest.mark.alone  # its ranks watch each other as those of a user do

STRATEGIES = ("auto", "send_recv", "local_all_gather", "global_all_gather", "broadcast")


def random_moves(moves: int, plans: int) -> dict[str, int]:
    """A child: moves on the CPU."""
    import torch.distributed as dist

    with gloo_group(60):
        seen = moved("cpu", moves, plans)
        dist.barrier()  # rank 0 hosts the store
        return seen


def moved(device_type: str, moves: int, plans: int) -> dict[str, int]:
    """Single tensors by `reshard`, then plans of many tensors, each run twice."""
    import torch.distributed as dist
    from reshard_world import Meshes

    meshes = Meshes(device_type)
    world = dist.get_world_size()
    seen: dict[str, int] = {}
    for seed in range(moves):
        move_one(random.Random(seed), meshes, world, seen)
    for seed in range(plans):
        move_many(random.Random(10_000 + seed), meshes, world, seen)
    return seen


def move_one(draw: random.Random, meshes, world: int, seen: dict[str, int]) -> None:
    """One tensor by `reshard`; half of the time only the ranks of the two meshes call."""
    import torch.distributed as dist
    from reshard_world import place, same_bits

    import interlace
    from interlace.reshard import Settings

    whole, source, target = random_case(draw, meshes, world)
    x = place(whole, source, draw=draw)
    before = None if x is None else x.to_local().clone()
    settings = Settings(
        strategy=draw.choice(STRATEGIES),
        order=draw.choice(("auto", "naive", "load_balance")),
        topology=random_topology(draw, world),
        memory_bytes=draw.choice((4096, 1 << 20)),
        chunk_bytes=draw.choice((None, 64, 1000)),
        outstanding=draw.choice((1, 2, 64)),
        watch=draw.random() < 0.5,
        timeout_s=30,
    )
    knows = draw.random() < 0.5
    members = set(source.mesh.mesh.flatten().tolist()) | set(target.mesh.mesh.flatten().tolist())
    if knows and dist.get_rank() not in members:
        return
    src_mesh = source.mesh if knows else None
    y = interlace.reshard(x, target.mesh, target.placements, src_mesh, settings=settings)
    check(whole, source, target, y)
    if x is not None:
        assert same_bits(before, x.to_local())
    note(seen, whole, source, target)


def random_case(draw: random.Random, meshes, world: int):
    from reshard_world import DTYPES, SIZES, Side, random_mesh, random_placements, random_whole
    from torch.distributed.tensor import Partial

    shape = [draw.choice(SIZES) for _ in range(draw.randrange(4))]
    source_mesh, target_mesh = (random_mesh(draw, meshes, world) for _ in range(2))
    dtype = draw.choice(DTYPES)
    sums = dtype.is_floating_point and dtype.itemsize >= 4
    placements = random_placements(draw, source_mesh, len(shape), partial=sums)
    whole = random_whole(draw, shape, dtype).to(meshes.device_type)
    if any(isinstance(placement, Partial) for placement in placements):
        whole = whole.nan_to_num(0.0, 1.0, -1.0)  # x + 0 must be x
    source = Side(source_mesh, placements)
    target = Side(target_mesh, random_placements(draw, target_mesh, len(shape), partial=False))
    return whole, source, target


def random_topology(draw: random.Random, world: int):
    """Pretends that the ranks are on several hosts; None where nothing is pretended."""
    from interlace.hardware.topology import Topology

    per_host = draw.choice((0, 1, 2, 4))
    if not per_host:
        return None
    return Topology(
        hosts=tuple(
            tuple(range(first, min(first + per_host, world))) for first in range(0, world, per_host)
        ),
        inter_host_bytes_per_s=1e9,
        intra_host_bytes_per_s=10e9,
        latency_ns=1000,
    )


def check(whole, source, target, result) -> None:
    import torch.distributed as dist
    from reshard_world import cut, same_bits

    rank = dist.get_rank()
    if rank not in target.mesh.mesh.flatten().tolist():
        assert result is None
        return
    assert result.device_mesh == target.mesh
    assert result.placements == target.placements
    assert result.shape == whole.shape
    assert same_bits(result.to_local(), cut(whole, target, rank)), (
        whole.dtype,
        whole.shape,
        source,
        target,
    )


def note(seen: dict[str, int], whole, source, target) -> None:
    """Counts the kinds of cases, so that the test can tell that all of them came up."""
    ours, theirs = (set(side.mesh.mesh.flatten().tolist()) for side in (source, target))
    kinds = {
        "all": True,
        "disjoint": not ours & theirs,
        "overlapping": bool(ours & theirs) and ours != theirs,
        "identical": ours == theirs,
        "scalar": whole.ndim == 0,
        "empty": whole.numel() == 0,
        "partial": any(p.is_partial() for p in source.placements),
        "strided": any(type(p).__name__ == "_StridedShard" for p in source.placements),
        "to strided": any(type(p).__name__ == "_StridedShard" for p in target.placements),
    }
    for kind, here in kinds.items():
        seen[kind] = seen.get(kind, 0) + here


def move_many(draw: random.Random, meshes, world: int, seen: dict[str, int]) -> None:
    """A plan of several tensors on different meshes, started twice with different values."""
    import torch.distributed as dist
    from reshard_world import place, random_whole

    from interlace.reshard import Move, ReshardPlan, Settings

    cases = {f"t{i}": random_case(draw, meshes, world) for i in range(draw.randrange(2, 9))}
    specs = {
        name: Move(
            shape=whole.shape,
            dtype=whole.dtype,
            src_mesh=source.mesh,
            src_placements=source.placements,
            dst_mesh=target.mesh,
            dst_placements=target.placements,
        )
        for name, (whole, source, target) in cases.items()
    }
    ranks = {
        rank
        for _, source, target in cases.values()
        for mesh in (source.mesh, target.mesh)
        for rank in mesh.mesh.flatten().tolist()
    }
    again = {
        name: random_whole(draw, w.shape, w.dtype).to(w.device) for name, (w, *_) in cases.items()
    }
    settings = Settings(
        topology=random_topology(draw, world),
        memory_bytes=draw.choice((4096, 1 << 20)),
        watch=draw.random() < 0.2,
        timeout_s=30,
    )
    if dist.get_rank() not in ranks:
        return
    plan = ReshardPlan(specs, settings=settings)
    for second in (False, True):
        wholes = {
            name: again[name] if second and not any(p.is_partial() for p in s.placements) else w
            for name, (w, s, _) in cases.items()
        }
        tensors = {
            name: place(wholes[name], source, draw=random.Random(name))
            for name, (_, source, _) in cases.items()
        }
        handle = plan.start(tensors)
        handle.progress()
        results = handle.wait()
        assert handle.buffer_bytes <= settings.memory_bytes
        for name, (whole, source, target) in cases.items():
            check(wholes[name], source, target, results[name])
            note(seen, whole, source, target)


@pytest.mark.parametrize(("world", "moves", "plans"), [(2, 120, 20), (4, 150, 30), (8, 60, 10)])
def test_random_moves_give_exactly_the_slices(world: int, moves: int, plans: int) -> None:
    results = run_ranks("test_reshard:random_moves", world, args=[moves, plans], timeout_s=200)
    together: dict[str, int] = {}
    for result in results:
        for kind, count in result.value.items():
            together[kind] = together.get(kind, 0) + count
    print(together)
    meshes_of_two_axes = world >= 4
    assert all(n for kind, n in together.items() if meshes_of_two_axes or "strided" not in kind)


def ways_to_call() -> dict[str, Any]:
    """A child: what a user sees of a plan for a state dict; all results are checked here."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import interlace
    from interlace.hardware.cluster import load_cluster
    from interlace.ranks.watchdog import Watchdog
    from interlace.reshard import Settings

    with gloo_group(60) as store:
        rank = dist.get_rank()
        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
        torch.manual_seed(0)
        whole = {"weight": torch.randn(512, 512), "bias": torch.arange(33), "step": torch.tensor(7)}
        places = {"weight": [Shard(0)], "bias": [Shard(0)], "step": [Replicate()]}
        state = None
        if rank < 2:
            state = {
                name: distribute_tensor(value, source, places[name], src_data_rank=None)
                for name, value in whole.items()
            }
            state["weight"].requires_grad_()

        def check(result: dict) -> None:
            for name, tensor in result.items():
                if rank == 0:
                    assert tensor is None
                else:
                    assert not tensor.requires_grad
                    assert torch.equal(tensor.full_tensor(), whole[name])

        wanted = {"weight": [Shard(1)], "bias": [Replicate()], "step": [Replicate()]}
        small = Settings(memory_bytes=64 << 10, outstanding=2, measure=True)
        plan = interlace.ReshardPlan.of(state, target, wanted, settings=small)
        handle = plan.start(state)
        steps = 1
        while not handle.progress():
            steps += 1
        check(handle.wait())
        assert handle.wait() is handle.wait()
        dist.barrier()
        with Watchdog(store, rank, 3, heartbeat_s=0.5, dead_after_s=3.0):
            unwatched = Settings(watch=False, cluster=load_cluster("h100"))
            other = interlace.ReshardPlan.of(state, target, wanted.get, source, settings=unwatched)
            check(other.start(state).wait())
        rates = plan.plan.topology
        assert rates.intra_host_bytes_per_s != other.plan.topology.intra_host_bytes_per_s
        return {
            "names": plan.names,
            "steps": steps,
            "buffers": handle.buffer_bytes,
            "described": plan.describe(),
            "hosts": [plan.plan.topology.hosts, other.plan.topology.hosts],
        }


def test_a_plan_of_a_state_dict_is_reused_bounded_and_described() -> None:
    """Measured rates, progress by hand, 64 KiB of buffers for 1 MiB, a watchdog of the caller."""
    for result in run_ranks("test_reshard:ways_to_call", 3, timeout_s=120):
        found = result.value
        assert found["names"] == ["weight", "bias", "step"]
        assert found["hosts"] == [[[0, 1, 2]], [[0, 1, 2]]]
        assert "weight" in found["described"]
        if result.rank < 2:  # the columns of a shard lie apart in memory
            assert 0 < found["buffers"] <= 64 << 10
            assert found["steps"] > 4


def test_importing_loads_neither_torch_nor_training_and_both_ways_of_import_work() -> None:
    """The package is the function, whether it or its planner is imported first."""
    check = """
import sys
import interlace
from interlace.reshard.planning.layout import Layout
assert "torch" not in sys.modules
assert callable(interlace.reshard)
from interlace.reshard import Settings
from interlace import ReshardPlan, reshard
assert reshard is interlace.reshard and ReshardPlan is interlace.reshard.ReshardPlan
parts = ("train", "graphs", "decompose", "parallel", "models", "search", "api", "report")
loaded = [name for name in sys.modules if name.startswith("interlace.")]
assert not [name for name in loaded if name.split(".")[1] in parts], loaded
for name in ("cattrs", "cyclopts", "tomli_w", "rich", "transformers", "safetensors", "ortools"):
    assert name not in sys.modules, name
"""
    subprocess.run([sys.executable, "-W", "error", "-c", check], check=True, timeout=100)
