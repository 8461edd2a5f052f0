"""Drill: a collective by one call that is declared, traced, planned and run on two ranks."""

from typing import Any

import own_collective
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import broadcast
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError
from interlace.ir.graph import Kind

QUICK = PlanConfig(cluster="h100")


class Scaled(nn.Module):
    """A linear layer under a scale that only the first rank of the group knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 1.0 + 6 * dist.get_rank()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * broadcast(self.scale, 0, dist.group.WORLD)


def facts() -> dict[str, Any]:
    """Refused before it is declared; then the numbers of eager PyTorch without any collective."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(1)
        model = Scaled()
        batches = [(torch.randn(4, 8),) for _ in range(4)]

        def compiled(schedule: str) -> interlace.Step:
            return interlace.compile_step(
                model, lambda m, x: m(x).square().mean(), batches[0],
                mesh=mesh, schedule=schedule, config=QUICK, per_rank=["scale"],
            )  # fmt: skip

        refused = ""
        try:
            compiled("two_strand")
        except InputError as error:
            refused = str(error)
        own_collective.declare_broadcast()
        seen = []
        for schedule in ("one_strand", "two_strand"):
            model.zero_grad()
            step = compiled(schedule)
            loss = step(batches)
            gradient = model.linear.weight.grad
            assert gradient is not None
            seen.append((loss.clone(), gradient.clone()))
        recorded = step.record(batches)
        model.zero_grad()
        for (x,) in batches:
            (model.linear(x).square().mean() / len(batches)).backward()
        plain = model.linear.weight.grad
        assert plain is not None
        return {
            "refused": refused,
            "same": all(map(torch.equal, *seen)),
            "right": torch.allclose(seen[0][1], plain, rtol=1e-5, atol=1e-7),
            "planned": [name for name, phase in step.plan.phases.items()
                        if any("broadcast" in op for op in phase.order)],
            "recorded": sum(row.count for row in recorded.collective_rows()
                            if row.kind == Kind.BROADCAST),
        }  # fmt: skip


def test_a_declared_call_is_enough() -> None:
    """Without it the operator is refused by name; with it one strand and two have the same bits,
    the gradient is right, and the recorder sees each broadcast."""
    for rank in run_ranks("test_own_collective:facts", 2, timeout_s=120):
        assert "broadcast" in rank.value["refused"]
        assert rank.value["same"]
        assert rank.value["right"]
        assert len(rank.value["planned"]) == 2  # the phases with a forward
        assert rank.value["recorded"] == 4
