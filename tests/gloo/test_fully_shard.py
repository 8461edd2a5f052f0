"""`compile_step` on modules under FSDP2's `fully_shard`, against FSDP2's own loop."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import interlace
from interlace.config import PlanConfig

pytestmark = pytest.mark.gloo
QUICK = PlanConfig(cluster="h100")
VOCABULARY, WIDTH, BATCHES, STEPS = 33, 16, 3, 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, 8)).permute(3, 0, 2, 1, 4)
        q, k, v = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """Two blocks; 33 rows and a scale of one number cannot be cut evenly."""

    def __init__(self, vocabulary: int = VOCABULARY, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("temperature", torch.tensor(0.9))
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale * self.temperature


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is put under `fully_shard`."""

    per_block: bool = True
    together: bool = False
    tied: bool = False
    frozen: bool = False
    axes: tuple[str, ...] = ("dp",)
    strands: int = 2
    named_mesh: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    bound: float = 0.0
    """Of differences."""


def second_dimension(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


TWO_RANKS = {
    "blocks": Case(),
    "root": Case(per_block=False, strands=1),
    "kept": Case(options={"reshard_after_forward": False}, named_mesh=True),
    "bf16": Case(options={"mp_policy": BF16}),
    "bf16 with outputs in float32": Case(
        per_block=False,
        options={"mp_policy": MixedPrecisionPolicy(torch.bfloat16, None, torch.float32)},
    ),
    "tied": Case(tied=True, per_block=False),
    "other dimension": Case(options={"shard_placement_fn": second_dimension}),
    "list": Case(together=True),
    "frozen": Case(frozen=True),
}


def tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    rows, whole = Shard(1), Replicate()
    ask = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,))
    plan = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=whole),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        own = {
            "norm": SequenceParallel(),
            "qkv": ColwiseParallel(input_layouts=rows),
            "out": RowwiseParallel(output_layouts=rows),
            "mlp": ask,
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(output_layouts=rows),
        }
        parallelize_module(block, mesh, own)


def built(case: Case, mesh: DeviceMesh) -> Model:
    model = Model(34 if "tp" in case.axes else VOCABULARY, tied=case.tied)
    model.blocks[0].requires_grad_(not case.frozen)
    if "tp" in case.axes:
        tensor_parallel(model, mesh["tp"])
        mesh = mesh["dp"]
    parts: list[Any] = list(model.blocks) if case.per_block else []
    parts += [[model.norm, model.head]] if case.together else []
    for part in (*parts, model):
        fully_shard(part, mesh=mesh, **case.options)
    return model


def batches_of(seed: int, data_rank: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1000 * data_rank + seed)
    found = [torch.randint(0, VOCABULARY, (2, 9), generator=draw) for _ in range(BATCHES)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in found]


def eager(model: nn.Module, batches: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    losses = [loss_of(model, *batch) for batch in batches]
    for batch in batches:
        (loss_of(model, *batch) / len(batches)).backward()
    return losses


def local(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def apart(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """The largest difference; layouts and types are the same."""
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        if isinstance(one, DTensor):
            assert isinstance(other, DTensor)
            assert one.placements == other.placements
        a, b = local(one), local(other)
        assert a is not None
        assert b is not None
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.numel():
            assert torch.isfinite(a).all()
            largest = max(largest, float((a.detach() - b.detach()).abs().max()))
    return largest


def differences(case: Case, mesh: DeviceMesh, data_rank: int) -> dict[str, float]:
    """Between steps and FSDP2's own loop; the last step is FSDP2's for both."""
    ours, theirs = built(case, mesh), built(case, mesh)
    step = interlace.compile_step(
        ours, loss_of, batches_of(0, data_rank)[0], strands=case.strands, config=QUICK,
        mesh=mesh if case.named_mesh or "tp" in case.axes else None,
    )  # fmt: skip
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    far = dict.fromkeys(("loss", "gradient", "weight", "evaluated"), 0.0)
    for number in range(STEPS + 1):
        batches = batches_of(number, data_rank)
        with torch.no_grad():
            seen = [[loss_of(m, *batches[0])] for m in (ours, theirs)]
        theirs.reshard()
        far["evaluated"] = max(far["evaluated"], apart(*seen))
        if number < STEPS:
            mean = step(batches)
            losses = step.losses
            assert torch.allclose(mean, torch.stack(losses).mean())
        else:
            ours.reshard()
            losses = eager(ours, batches)
        far["loss"] = max(far["loss"], apart(losses, eager(theirs, batches)))
        gradients = [[p.grad for p in m.parameters()] for m in (ours, theirs)]
        far["gradient"] = max(far["gradient"], apart(*gradients))
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            for on in {p.device_mesh for p in model.parameters()}:
                own = [p for p in model.parameters() if p.device_mesh == on]
                nn.utils.clip_grad_norm_(own, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        states = [list(m.state_dict().values()) for m in (ours, theirs)]
        far["weight"] = max(far["weight"], apart(*states))
    return far


def two_ranks() -> dict[str, dict[str, float]]:
    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        return {
            name: differences(case, mesh, mesh.get_local_rank()) for name, case in TWO_RANKS.items()
        }


def test_two_ranks() -> None:
    for result in run_ranks("test_fully_shard:two_ranks", 2, timeout_s=120):
        for name, far in result.value.items():
            assert all(value <= TWO_RANKS[name].bound for value in far.values()), (name, far)
