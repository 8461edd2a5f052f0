"""Proves that tensor + sequence parallel models compute what one process computes.

Gradients are compared in float64, so the bound of 1e-10 allows no error but rounding. One launch
of ranks per world size; the tests read the facts that it returns.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import saved
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import interlace.parallel.tensor
from interlace.config import ModelConfig
from interlace.graphs.trace import StrandGraph, trace_chunk
from interlace.model_config import ExpertsConfig
from interlace.models import model_file
from interlace.models.hugging_face import export, load_config, load_weights
from interlace.models.hugging_face_files import StoredTensor
from interlace.parallel.tensor import apply_tensor_parallel, finish_gradients, loss_context
from interlace.train.built_model import NextTokenLoss

VOCABULARY, SEQUENCE = 64, 16
SMALL = {"layers": 1, "width": 64, "ffn_width": 96}
CASES: dict[str, ModelConfig] = {
    "llama": ModelConfig(**SMALL, heads=8, kv_heads=8),
    "llama, 1 key head": ModelConfig(**SMALL, heads=8, kv_heads=1),
    "llama, 2 key heads": ModelConfig(**SMALL, heads=8, kv_heads=2, tied_head=True),
    "llama, norms of heads": ModelConfig(
        **SMALL, heads=4, kv_heads=1, head_size=24, query_key_norm=True, attention_bias=True
    ),
    "moe": ModelConfig(
        width=64,
        ffn_width=96,
        layers=2,
        heads=4,
        kv_heads=2,
        architecture="moe",
        norm="layer",
        head_size=24,
        query_key_norm=True,
        attention_bias=True,
        head_bias=True,
        experts=ExpertsConfig(
            count=4,
            ffn_width=32,
            shared_width=16,
            dense_layers=1,
            balance="auxiliary_loss",
            auxiliary_weight=0.1,
        ),
    ),
    "gpt": ModelConfig(**SMALL, heads=8, kv_heads=8, architecture="gpt", tied_head=True),
    "gpt, 1 key head": ModelConfig(**SMALL, heads=8, kv_heads=1, architecture="gpt"),
    "gpt, 2 key heads": ModelConfig(**SMALL, heads=8, kv_heads=2, architecture="gpt"),
}
RUNS = {
    2: ("llama, 1 key head", "llama, norms of heads", "moe", "gpt"),
    4: (
        "llama",
        "llama, norms of heads",
        "llama, 2 key heads",
        "gpt, 1 key head",
        "gpt, 2 key heads",
    ),
}
TRACED = {
    2: ("llama, 1 key head", "llama, norms of heads", "moe", "gpt"),
    4: ("llama, 2 key heads", "gpt, 2 key heads"),
}


def build(config: ModelConfig) -> nn.Module:
    """A float64 model with random norms and biases too, the same in every process."""
    torch.manual_seed(3)
    model = model_file(config.architecture).build(config, VOCABULARY, SEQUENCE).double()
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return NextTokenLoss(model, config.experts.auxiliary_weight)


def batches() -> list[tuple[Tensor, Tensor]]:
    text = torch.randint(0, VOCABULARY, (2, 2, SEQUENCE + 1), generator=torch.Generator())
    return [(sample[:, :-1].contiguous(), sample[:, 1:].contiguous()) for sample in text]


def laid_out(config: ModelConfig, mesh: DeviceMesh) -> nn.Module:
    module = build(config)
    apply_tensor_parallel(
        module.get_submodule("model"), mesh, model_file(config.architecture).TENSOR_PLAN
    )
    return module


def train_step(module: nn.Module) -> list[float]:
    """Losses of two micro-batches; gradients of their sum, by autograd."""
    made = [module(*batch) for batch in batches()]
    losses = [each[0] if isinstance(each, tuple) else each for each in made]
    for loss in losses:
        loss.backward()
    return [loss.item() for loss in losses]


def run_traced(module: nn.Module) -> list[float]:
    """The same by the traced graphs, node by node as they were traced."""
    chunk = trace_chunk(module, batches()[0])
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    held = {name: getattr(t.detach(), "to_local", t.detach)() for name, t in state.items()}
    losses = []
    for batch in batches():

        def run(graph: StrandGraph, values: dict[str, Tensor], batch: Any = batch) -> list[Tensor]:
            known = {"batch": dict(enumerate(batch)), "saved": values, "tangent": values}
            inputs = []
            for binding in graph.bindings.values():
                key = int(binding.target) if binding.role == "batch" else binding.target
                inputs.append(known.get(binding.role, held)[key])
            with torch.no_grad():
                return graph.module(*inputs)

        loss, *saved_values = run(chunk.forward, {})
        values = dict(zip(chunk.saved, saved_values, strict=True)) | {"": torch.ones_like(loss)}
        gradients = run(chunk.backward, values)
        for name, gradient in zip(chunk.parameters, gradients, strict=True):
            add_gradient(state[name], gradient, chunk.placements[name])
        losses.append(loss.item())
    return losses


def add_gradient(parameter: Tensor, gradient: Tensor, placements: Any) -> None:
    if isinstance(parameter, DTensor):
        gradient = DTensor.from_local(
            gradient, parameter.device_mesh, placements,
            run_check=False, shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def furthest(module: nn.Module, plain: nn.Module, mesh: DeviceMesh) -> float:
    """The largest difference of any gradient's element from the plain module's, relative to the
    largest of that gradient. Every gradient must lie as its parameter."""
    worst = 0.0
    largest = max(p.grad.abs().max().item() for p in plain.parameters())
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.grad.placements == parameter.placements
        expected = plain.get_parameter(name).grad
        mine = distribute_tensor(expected, mesh, parameter.placements, src_data_rank=None)
        difference = (parameter.grad.to_local() - mine.to_local()).abs().max().item()
        worst = max(worst, difference / max(expected.abs().max().item(), 1e-3 * largest))
    return worst


def gradient_facts(name: str, mesh: DeviceMesh) -> dict[str, float]:
    """How far each way of running is from one plain process: gradients and losses."""
    config = CASES[name]
    plain = build(config)
    expected = train_step(plain)
    ways = ["eager", "in place", *(["traced"] if name in TRACED[mesh.size()] else [])]
    facts = {}
    for way in ways:
        interlace.parallel.tensor.BUNDLED_BYTES = 0 if way == "in place" else 1 << 20
        module = laid_out(config, mesh)
        with loss_context(mesh):
            losses = run_traced(module) if way == "traced" else train_step(module)
        finish_gradients(list(module.parameters()))
        facts[way] = furthest(module, plain, mesh)
        facts[f"{way}, losses"] = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    return facts


def gradients_child(ranks: int) -> dict[str, Any]:
    with gloo_group():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        return {name: gradient_facts(name, mesh) for name in RUNS[ranks]}


@pytest.mark.parametrize("ranks", RUNS)
def test_gradients_equal_one_process(ranks: int) -> None:
    """Both families, key heads divided among or repeated on ranks, tied and untied: losses and
    gradients of every parameter on every rank, eager, traced, and with each gradient summed by
    itself in place."""
    results = run_ranks("test_tensor_parallel:gradients_child", ranks, args=[ranks], timeout_s=180)
    for result in results:
        assert set(result.value) == set(RUNS[ranks])
        for case, facts in result.value.items():
            assert {"eager", "in place"} <= facts.keys()
            assert ("traced" in facts) == (case in TRACED[ranks])
            for what, difference in facts.items():
                assert difference < 1e-10, f"rank {result.rank}, {case}, {what}"


def files_child(folder: str) -> dict[str, Any]:
    """Load a checkpoint into a laid-out model, counting what is read, and export it again."""
    read: list[int] = []
    original = StoredTensor.read

    def counted(self: StoredTensor, region: Any) -> Tensor:
        found = original(self, region)
        read.append(found.numel())
        return found

    StoredTensor.read = counted
    facts = {}
    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for name in ("gpt2", "grouped queries"):
            source = Path(folder) / name
            config = load_config(source)
            files = model_file(config.architecture)
            plain = files.build(config, config.vocab_size, 32)
            load_weights(plain, source)
            model = files.build(config, config.vocab_size, 32)
            apply_tensor_parallel(model, mesh, files.TENSOR_PLAN)
            read.clear()
            load_weights(model, source)
            local = sum(p.to_local().numel() for p in model.parameters())
            whole = sum(p.numel() for p in plain.parameters())
            facts[f"{name}: reads only its parts"] = sum(read) == local < 0.6 * whole
            facts[f"{name}: equal weights"] = all(
                torch.equal(p.full_tensor(), plain.get_parameter(key))
                for key, p in model.named_parameters()
            )
            state = dict(model.named_parameters())
            export(state, config, Path(folder) / f"{name} again", sequence_length=32)
    return facts


def test_checkpoints_of_laid_out_models(tmp_path: Path) -> None:
    """Two ranks each read only their parts, hold the same weights as one process, and export the
    same bits."""
    from safetensors.torch import load_file

    for name in ("gpt2", "grouped queries"):
        saved(name, tmp_path / name)
    results = run_ranks("test_tensor_parallel:files_child", 2, args=[str(tmp_path)], timeout_s=150)
    for result in results:
        assert all(result.value.values()), result.value
    for name in ("gpt2", "grouped queries"):
        before = load_file(tmp_path / name / "model.safetensors")
        after = load_file(tmp_path / f"{name} again" / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
