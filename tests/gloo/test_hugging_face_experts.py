"""Unmodified `transformers` models with experts train as their own code does, on one rank and on
data-parallel ones; what cannot be traced or split is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import VOCABULARY, batch, saved
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError
from interlace.models.transformers_model import TransformersLoss, build
from interlace.parallel.plans import apply_published_plan

BOUND = 1e-5
"""Of gradients, over the largest one, in float32: grouped matmuls add in another order than the
loop over experts."""
QUICK = PlanConfig(search="list", cluster="h100")
TRACED = {"mixtral": False, "mixtral, tied, linear": True, "qwen3_moe, dense layers": True}
"""Models, and whether their config.json asks for the auxiliary loss."""


def loss_fn(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return module(tokens, targets)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Four micro-batches."""
    tokens, targets = batch()
    return [(tokens.roll(n, 1).contiguous(), targets.roll(n, 1).contiguous()) for n in range(4)]


def built(folder: Path | str) -> nn.Module:
    return build(str(folder), vocab_size=VOCABULARY, sequence_length=24)


def eager(folder: Path | str) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and gradients of their own code, loop over experts and all, on one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").train()
    total = 0.0
    for tokens, targets in batches():
        found = model(input_ids=tokens)
        loss = nn.functional.cross_entropy(found.logits.flatten(0, 1), targets.flatten())
        if found.aux_loss is not None:
            loss = loss + model.config.router_aux_loss_coef * found.aux_loss
        (loss / 4).backward()
        total += loss.item() / 4
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def step_of(folder: Path | str, strands: int, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """The same of a compiled step."""
    module = TransformersLoss(built(folder))
    mine: Any = options.pop("mine", slice(None))
    step = interlace.compile_step(
        module, loss_fn, batches()[0], strands=strands, config=QUICK, **options
    )
    loss = float(step(batches()[mine]))
    named = module.model.named_parameters()
    return loss, {name: p.grad.clone() for name, p in named if p.grad is not None}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / largest


@pytest.mark.parametrize("case", TRACED)
def test_on_one_rank(case: str, tmp_path: Path) -> None:
    """Loss and gradients are those of their own code, with its auxiliary loss if config.json asks
    for it, and two strands have the bits of one."""
    save(case, tmp_path, auxiliary=TRACED[case])
    wanted = eager(tmp_path)
    one, two = step_of(tmp_path, 1), step_of(tmp_path, 2)
    assert one[0] == two[0]
    assert all(torch.equal(one[1][name], gradient) for name, gradient in two[1].items())
    assert abs(one[0] - wanted[0]) < BOUND
    assert error(one[1], wanted[1]) < BOUND


def save(case: str, folder: Path, *, auxiliary: bool) -> None:
    saved(case, folder)
    file = folder / "config.json"
    settings = {"output_router_logits": auxiliary, "router_aux_loss_coef": 0.1}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def replicas(folder: str) -> dict[str, float]:
    """On each of two ranks, which see two micro-batches each."""
    with gloo_group(timeout_s=60) as rank:
        del rank
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
        mine = slice(2 * mesh.get_rank(), 2 * mesh.get_rank() + 2)
        _, found = step_of(folder, 2, mesh=mesh, mine=mine)
        return {"error": error(found, eager(folder)[1])}


def test_on_data_parallel_ranks(tmp_path: Path) -> None:
    """Gradients are averaged as of any model."""
    save("mixtral", tmp_path, auxiliary=False)
    args = [str(tmp_path)]
    results = run_ranks("test_hugging_face_experts:replicas", 2, args=args, timeout_s=100)
    assert all(result.value["error"] < BOUND for result in results)


def tensor_parallel(folder: str) -> str:
    with gloo_group(timeout_s=60):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(InputError) as refused:
            apply_published_plan(built(folder), mesh)
        return refused.value.message


def test_what_is_refused(tmp_path: Path) -> None:
    """PhiMoE draws experts at random, and chooses positions by the values of its inputs; plans that
    split experts have styles of their own."""
    for case, message in (("phimoe, plain", "exponential.*draws"), ("phimoe", "cannot be traced")):
        saved(case, tmp_path / case)
        with pytest.raises(InputError, match=message):
            step_of(tmp_path / case, 2)
    saved("mixtral", tmp_path / "mixtral")
    args = [str(tmp_path / "mixtral")]
    found = run_ranks("test_hugging_face_experts:tensor_parallel", 2, args=args, timeout_s=60)
    for result in found:
        assert "moe_tp_experts" in result.value
