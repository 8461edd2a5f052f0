"""Move a Llama's weights from the ranks that train it to the ranks that generate with it.

    torchrun --nproc-per-node 4 examples/move_weights.py
    torchrun --nproc-per-node 4 examples/move_weights.py --width 1024 --layers 8 --steps 5

Reinforcement learning does this every few steps: training holds the model fully sharded on top of
tensor parallelism (dp_shard 2, tp 2), generation holds it with tensor parallelism of four, and an
evaluator wants all of it in one process. Each move is planned once and repeated.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import interlace
from interlace.config import ModelConfig
from interlace.models.llama import TENSOR_PLAN, Llama, build
from interlace.parallel.tensor import apply_tensor_parallel, loss_context

VOCABULARY, SEQUENCE = 4096, 32
ROWS = ("attention.output.weight", "ffn.down.weight")
COLUMNS = ("query.weight", "key.weight", "value.weight", "gate.weight", "up.weight", "head.weight")


def trained_model(config: ModelConfig, mesh: DeviceMesh) -> Llama:
    """A model that is split over "tp", and each of its shards over "dp_shard"."""
    torch.manual_seed(0)
    model = build(config, VOCABULARY, SEQUENCE)
    apply_tensor_parallel(model, mesh["tp"], TENSOR_PLAN)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    return model


def generator_placements(name: str) -> list[Placement]:
    """Where a weight is on the generator's mesh ("tp" of four): rows, columns or whole."""
    if name.endswith(ROWS):
        return [Shard(1)]
    return [Shard(0)] if name.endswith((*COLUMNS, "embedding.weight")) else [Replicate()]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, step: int
) -> None:
    """One step on random tokens."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=draw)
    with loss_context(mesh["tp"]):
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].t().flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module) -> dict[str, DTensor]:
    """The weights as this rank holds them."""
    found = model.state_dict()
    assert all(isinstance(value, DTensor) for value in found.values())
    return found


def check(moved: dict[str, DTensor | None], weights: dict[str, DTensor]) -> None:
    """The moved weights have the bits of the trained ones (gathering all of them is slow)."""
    for name, weight in weights.items():
        whole, part = weight.full_tensor(), moved[name]
        if part is None:
            continue
        (placement,), rank = part.placements, part.device_mesh.get_local_rank()
        if isinstance(placement, Shard):
            whole = whole.chunk(part.device_mesh.size(), placement.dim)[rank]
        assert torch.equal(part.to_local(), whole), name


def main() -> None:
    """Train, move, look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    training = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    generating = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    evaluating = DeviceMesh("cpu", torch.tensor([0]))
    config = ModelConfig(layers=arguments.layers, width=arguments.width, heads=8, kv_heads=8)
    model = trained_model(config, training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    size = sum(weight.numel() * weight.itemsize for weight in state(model).values())
    say = print if dist.get_rank() == 0 else lambda *_, **__: None

    begin_s = time.perf_counter()
    plans = {
        "to tp 4": interlace.ReshardPlan.of(state(model), generating, generator_placements),
        "to one process": interlace.ReshardPlan.of(state(model), evaluating, [Replicate()]),
    }
    say(f"{len(state(model))} tensors, {size / 1e6:.1f} MB; two plans in", end=" ")
    say(f"{time.perf_counter() - begin_s:.2f} s")
    for step in range(arguments.steps):
        train_step(model, optimizer, training, step)
        for name, plan in plans.items():
            dist.barrier()
            begin_s = time.perf_counter()
            moved = plan.start(state(model)).wait()
            took_s = time.perf_counter() - begin_s
            say(f"step {step + 1}: {name} in {took_s:.3f} s, {size / took_s / 1e6:.0f} MB/s")
            check(moved, state(model))
    say("all moved weights have the bits of the trained ones")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
