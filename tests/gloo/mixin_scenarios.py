"""The scenarios of `transformers`' mixin for tensor and expert parallelism, for models of ours.

Its tests (`tests/test_tensor_parallel_mixin.py`) take a model's forward and backward on ranks and
compare logits, loss and the gradient of every parameter with one process, within 5e-3:
`test_tp_*` and `test_sp_*` (ours are one: tensor parallelism always shares sequences), `test_ep_*`.
Generation is not among ours.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hugging_face_models import VOCABULARY
from mixture_models import gradients_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from interlace.config import ParallelConfig, RunConfig
from interlace.ir.plan import PhasePlan
from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.models.hugging_face import load_config
from interlace.models.hugging_face_names import FAMILIES, pieces
from interlace.parallel.data import data_layout
from interlace.parallel.meshes import Meshes, build_meshes
from interlace.parallel.tensor import loss_context
from interlace.runtime.executor import Batch
from interlace.runtime.traced_strands import build_strands
from interlace.step import Step
from interlace.train.built_model import build_module
from interlace.train.step_runners import EagerRunner, planned_step
from interlace.train.weights import MasterWeights
from orders import random_order
from phases import plan_by

TOLERANCE = 5e-3
"""Absolute and relative, of the mixin."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor and sequence parallel": {"tensor": 2},
    "expert parallel": {"data_shard": 2, "expert": 2},
}


def scenario(
    layout: str,
    folder: str,
    batches: list[Batch],
    loss: float,
    wanted: dict[str, Tensor],
    *,
    traced: bool = False,
) -> dict[str, Any]:
    """On each of two ranks: a step of our model of `folder`, against the logits, `loss` and
    gradients `wanted` of `transformers` on one process. A step of eager autograd, as the mixin's
    is, or (`traced`, which takes seconds) of two strands in a random order."""
    parallel = ParallelConfig(**LAYOUTS[layout])
    model = load_config(folder, ModelConfig(experts=ExpertsConfig(**_training(folder))))
    config = RunConfig(
        model=replace(model, config=folder), parallel=parallel,
        data=replace(RunConfig().data, sequence_length=batches[0][0].shape[1]),
    )  # fmt: skip
    meshes = build_meshes(parallel, "cpu")
    module = build_module(config, meshes, VOCABULARY, torch.device("cpu"))
    data = data_layout(module, parallel, meshes, torch.float32)
    weights = MasterWeights(module, torch.float32, data=data, meshes=meshes)
    mine = batches[meshes.data_rank :: meshes.data_ranks]
    step = _strands(weights, meshes, mine) if traced else EagerRunner(weights, meshes)
    total = torch.as_tensor(step(mine))
    if meshes.data_ranks > 1:
        torch.distributed.all_reduce(total)
    return {
        "layout": layout,
        "logits": _close(_logits(weights, mine[0][0]), _their_logits(folder, mine[0][0])),
        "loss": abs(float(total) / meshes.data_ranks - loss),
        "wrong": _wrong(folder, _own(gradients_of(weights)), wanted),
    }


def _strands(weights: MasterWeights, meshes: Meshes, mine: list[Batch]) -> Step:
    with loss_context(meshes.tensor):
        strands = build_strands(
            weights.module, mine[0], meshes.axis_of_group, data=weights.data,
            buffer_dtype=torch.float32,
        )  # fmt: skip
    plan = plan_by(strands.op_graphs, lambda graph: PhasePlan(random_order(graph, 3), 0, 0), 5)
    constants = {**weights.constants(), **weights.buffers()}
    return planned_step(weights, strands, plan, constants)


def _training(folder: str) -> dict[str, Any]:
    """The auxiliary loss that config.json asks for."""
    config = _config(folder)
    if not config.get("output_router_logits"):
        return {}
    return {"balance": "auxiliary_loss", "auxiliary_weight": config["router_aux_loss_coef"]}


@torch.no_grad()
def _logits(weights: MasterWeights, tokens: Tensor) -> Tensor:
    """[B, S, V], of our model as it lies on ranks."""
    weights.gather()
    model: Any = weights.module.model
    logits = model(tokens).logits
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return whole.transpose(0, 1)


@torch.no_grad()
def _their_logits(folder: str, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=tokens).logits


def _close(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(
        found, wanted, rtol=TOLERANCE, atol=TOLERANCE
    )


def _own(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names of the model inside the loss."""
    return {name.removeprefix("model."): gradient for name, gradient in gradients.items()}


def _wrong(folder: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Parameters of ours whose gradient is not theirs within the tolerance, absolute and over the
    largest element of all: gradients of these small models are far below 1."""
    family = next(f for f in FAMILIES if f.model_type == _config(folder)["model_type"])
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    names = pieces(family, found, fused=True)
    theirs = {
        name: wanted[piece.tensor].chunk(piece.parts, piece.dim)[piece.part]
        for name, piece in names.items()
    }
    far = [
        name
        for name, gradient in found.items()
        if (gradient - theirs[name]).abs().max() > TOLERANCE * min(1.0, largest)
    ]
    return far + [name for name in found if not _close(found[name], theirs[name])]


def _config(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found
