"""A mixture of experts that this project did not write, with functional all-to-alls of fixed
capacity, through `compile_step`; and experts' weights that `interlace.reshard` deals anew.

One start of four ranks: two replicas of two ranks that hold the experts between them.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mixture_models import MixtureLoss
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import interlace
from interlace.config import PlanConfig
from interlace.parallel.expert import apply_expert_parallel, dealt_parameters

RANKS, REPLICAS, EXPERT_RANKS = 4, 2, 2
WIDTH, INNER, EXPERTS, CAPACITY, LAYERS, MICRO_BATCHES = 8, 12, 4, 5, 2, 3
BOUND = 1e-10
"""Largest difference of a float64 gradient, relative to the largest element of its parameter."""
QUICK = PlanConfig(search="list", cluster="h100")


class SwitchLayer(nn.Module):
    """One expert a token, of which each takes `CAPACITY` of a rank's tokens; the others' output is
    0. As in GShard (arXiv 2006.16668): dispatch and combine are products with a mask, and buffers
    of equal size travel, so that every shape is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.group: dist.ProcessGroup | None = None
        self.ranks = 1

    def deal(self, mesh: DeviceMesh) -> None:
        """Keep the weights of this rank's experts."""
        self.group, self.ranks = mesh.get_group(), mesh.size()
        for name in ("up", "down"):
            own = getattr(self, name).detach().chunk(self.ranks)[mesh.get_local_rank()]
            setattr(self, name, nn.Parameter(own.clone()))

    def forward(self, x_ND: Tensor) -> Tensor:
        gates_NE = self.router(x_ND).softmax(-1)
        gate_N, id_N = gates_NE.max(-1)
        chosen_NE = F.one_hot(id_N, EXPERTS)
        place_N = (chosen_NE.cumsum(0) * chosen_NE).sum(-1) - 1
        slot_NC = F.one_hot(place_N.clamp(max=CAPACITY), CAPACITY + 1)[:, :CAPACITY]
        mask_NEC = (chosen_NE.unsqueeze(2) * slot_NC.unsqueeze(1)).to(x_ND.dtype)
        rows_ECD = torch.einsum("nec,nd->ecd", mask_NEC, x_ND)
        rows = self._sent(rows_ECD).view(self.ranks, -1, CAPACITY, WIDTH)
        inner = torch.einsum("rlcd,ldf->rlcf", rows, self.up).relu()
        out = torch.einsum("rlcf,lfd->rlcd", inner, self.down)
        back_ECD = self._sent(out.reshape(EXPERTS, CAPACITY, WIDTH))
        return torch.einsum("nec,ecd->nd", mask_NEC, back_ECD) * gate_N.unsqueeze(1)

    def _sent(self, rows_ECD: Tensor) -> Tensor:
        """To the ranks of the experts, or back: each rank gets an equal part of the first
        dimension."""
        if self.group is None:
            return rows_ECD
        parts = [EXPERTS // self.ranks] * self.ranks
        return all_to_all_single_autograd(rows_ECD.contiguous(), parts, parts, self.group)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.experts = nn.ModuleList(SwitchLayer() for _ in range(LAYERS))
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.5, generator=draw)

    def forward(self, x_ND: Tensor, target_ND: Tensor) -> Tensor:
        for mixed, experts in zip(self.mixed, self.experts, strict=True):
            x_ND = x_ND + torch.tanh(mixed(x_ND))
            x_ND = x_ND + experts(x_ND)
        return F.mse_loss(x_ND, target_ND)


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(rank)
    made = torch.randn(MICRO_BATCHES, 2, 16, WIDTH, generator=draw)
    return [(x.contiguous(), target.contiguous()) for x, target in made]


def _reference() -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Losses by rank, and gradients of their mean, of eager PyTorch on one process."""
    model = Own()
    losses = [[model(*batch) for batch in batches(rank)] for rank in range(RANKS)]
    (sum(map(sum, losses)) / (RANKS * MICRO_BATCHES)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [[loss.detach() for loss in own] for own in losses], gradients


def _own_model(mesh: DeviceMesh) -> dict[str, Any]:
    """A compiled step by one strand and by two. Replicas are averaged by it; over the ranks of the
    experts the loop does that, as for any axis that is not `dp_replicate`."""
    rank, ep = mesh.get_rank(), mesh["ep"]
    ways = []
    for strands in (1, 2):
        model = Own()
        for layer in model.experts:
            layer.deal(ep)
        step = interlace.compile_step(
            model, lambda module, *batch: module(*batch), batches(rank)[0], mesh=mesh,
            strands=strands, config=QUICK, per_rank=["experts.*.up", "experts.*.down"],
        )  # fmt: skip
        step(batches(rank))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        ways.append(([loss.clone() for loss in step.losses], gradients))
    (losses, one), (others, two) = ways
    first = {name: gradient.clone() for name, gradient in one.items()}
    graph = step.strands.op_graphs["forward"]
    losses_of, wanted = _reference()
    off = 0.0
    for name, summed in one.items():
        want = wanted[name]
        if name.endswith((".up", ".down")):
            want = want.chunk(EXPERT_RANKS)[ep.get_local_rank()]
        else:
            dist.all_reduce(summed, group=ep.get_group())
        off = max(off, float((summed / EXPERT_RANKS - want).abs().max() / want.abs().max()))
    return {
        "losses alike": all(map(torch.equal, losses, others)),
        "gradients alike": all(map(torch.equal, first.values(), two.values())),
        "loss": max(float(abs(a - b)) for a, b in zip(losses, losses_of[rank], strict=True)),
        "gradients": off,
        "exchanges": sum(op.lane == "ep" for op in graph.operators),
    }


def _dealt_anew(mesh: DeviceMesh) -> dict[str, bool]:
    """Experts' weights from two ranks in each replica to four ranks without replicas, and back."""
    module = MixtureLoss(1, WIDTH, INNER)
    whole = {name: p.detach().clone() for name, p in module.named_parameters()}
    apply_expert_parallel(module, mesh["ep"])
    each = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    held = {}
    for name in dealt_parameters(module):
        two = module.get_parameter(name).detach()
        source = DTensor.from_local(two, mesh, [Replicate(), Shard(0)], run_check=False)
        four = interlace.reshard(source, each, [Shard(0)])
        held[f"{name}, four"] = torch.equal(
            four.to_local(), whole[name].chunk(RANKS)[each.get_rank()]
        )
        back = interlace.reshard(four, mesh, [Replicate(), Shard(0)])
        held[f"{name}, two"] = torch.equal(back.to_local(), two)
    return held


def child() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    with gloo_group(60):
        names = ("dp_replicate", "ep")
        mesh = init_device_mesh("cpu", (REPLICAS, EXPERT_RANKS), mesh_dim_names=names)
        found = {"own": _own_model(mesh), "resharded": _dealt_anew(mesh)}
        dist.barrier()
    return found


def test_own_experts_and_experts_dealt_anew() -> None:
    """Losses and gradients are those of one eager process, two strands have one's bits, and the
    all-to-alls are in the plan; resharded weights are the slices of the whole ones, bit by bit."""
    for result in run_ranks("test_own_experts:child", RANKS, timeout_s=120):
        own = result.value["own"]
        assert own["losses alike"], own
        assert own["gradients alike"], own
        assert own["loss"] < BOUND, own
        assert own["gradients"] < BOUND, own
        assert own["exchanges"] == 2 * LAYERS, own
        assert all(result.value["resharded"].values()), result.value
        assert len(result.value["resharded"]) == 2 * 3
