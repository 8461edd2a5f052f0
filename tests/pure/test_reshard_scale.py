"""Proves that plans of whole models take work in proportion to ranks, not to tensors or bytes.

Work is counted in tasks and messages, since no test depends on time.
"""

import pytest

from interlace.hardware.topology import Topology
from interlace.reshard.planning.chunking import MANY, default_chunk_bytes, messages
from interlace.reshard.planning.ends import Links
from interlace.reshard.planning.layout import Layout
from interlace.reshard.planning.make_plan import make_plan
from interlace.reshard.planning.tasks import make_bundles, make_tasks
from interlace.reshard.planning.transfer_plan import TensorSpec

Weights = list[tuple[str, tuple[int, ...], str]]


def llama(layers: int, width: int, hidden: int, vocabulary: int) -> Weights:
    """(name, shape, placement on the tensor-parallel axis) of every weight, bfloat16."""
    column, row, whole = "S(0)", "S(1)", "R"
    layer = [
        ("q", (width, width), column),
        ("k", (1024, width), column),
        ("v", (1024, width), column),
        ("o", (width, width), row),
        ("gate", (hidden, width), column),
        ("up", (hidden, width), column),
        ("down", (width, hidden), row),
        ("norm_1", (width,), whole),
        ("norm_2", (width,), whole),
    ]
    weights = [(f"{i}.{name}", shape, cut) for i in range(layers) for name, shape, cut in layer]
    ends = [("embed", (vocabulary, width), column), ("norm", (width,), whole)]
    return [*weights, *ends, ("head", (vocabulary, width), column)]


def to_inference(
    weights: Weights, fsdp: int, tp: int, replicas: int, tp_after: int
) -> tuple[list[TensorSpec], Topology]:
    """From fully sharded and tensor-parallel training ranks to inference ranks beside them."""
    training = tuple(range(fsdp * tp))
    inference = tuple(range(len(training), len(training) + replicas * tp_after))
    specs = []
    for name, shape, cut in weights:
        source = Layout(
            shape=shape,
            ranks=training,
            mesh_shape=(fsdp, tp),
            placements=("_S(0)" if cut == "S(0)" else "S(0)", cut),
        )
        destination = Layout(
            shape=shape, ranks=inference, mesh_shape=(replicas, tp_after), placements=("R", cut)
        )
        specs.append(
            TensorSpec(name=name, shape=shape, itemsize=2, source=source, destination=destination)
        )
    hosts = (len(training) + len(inference)) // 8
    topology = Topology(
        hosts=tuple(tuple(range(8 * h, 8 * h + 8)) for h in range(hosts)),
        inter_host_bytes_per_s=50e9,
        intra_host_bytes_per_s=360e9,
        nics_per_host=8,
        latency_ns=15_000,
    )
    return specs, topology


def test_70b_between_64_and_64_ranks() -> None:
    """723 tensors are 392 tasks and as many messages as MANY allows, within 1.05 of the bound."""
    specs, topology = to_inference(llama(80, 8192, 28672, 128256), 8, 8, 8, 8)
    assert len(specs) == 723
    plan = make_plan(specs, topology)
    assert len(plan.tasks) == 392
    assert len(plan.transfers) <= MANY
    assert plan.predicted_ns <= 1.05 * plan.lower_bound_ns


@pytest.mark.parametrize("layers", [1, 126])
def test_405b_between_1024_and_2048_ranks(layers: int) -> None:
    """Tasks do not grow with layers, messages not with bytes: each rank needs slices of 128 ranks
    per tensor-parallel part, so there are at least 262,144 messages; twice that is the limit."""
    specs, topology = to_inference(llama(layers, 16384, 53248, 128256), 128, 8, 128, 16)
    tasks, copies = make_tasks(specs)
    assert len(tasks) == 8328
    assert not copies
    bundles = make_bundles(specs, tasks)
    assert sum(bundle.size_bytes for bundle in bundles) == sum(
        2 * spec.shape[0] * (spec.shape[1] if len(spec.shape) > 1 else 1) for spec in specs
    )
    size = default_chunk_bytes(bundles, Links(topology))
    assert messages(bundles, size) <= 2 * 2048 * 128 + MANY
