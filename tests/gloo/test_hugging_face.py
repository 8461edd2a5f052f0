"""Unmodified `transformers` models, split by the plans that they publish, train as their own code
does: two real processes, tensor parallelism, two strands.

Wide are a Llama and a Mistral, whose layers the others have too.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from processes import gloo_group, run_ranks

import interlace
from wide import asked, wide_unless

STEPS, MICRO_BATCHES, SEQUENCE, VOCABULARY = 20, 3, 16, 96
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},  # norms of the heads: their gradients are partial
    "gemma": {},  # tied, scaled embedding
    "mistral": {"sliding_window": 8, "num_hidden_layers": 1},  # a mask of its own
    "phi3": {"num_hidden_layers": 1},  # packed projections: gathered and split again
}
QUICK_MODELS = ("gemma", "qwen3", "phi3")
LOSS_BOUND = 2e-5
"""Relative, after 20 steps of AdamW in float32; sums over ranks round differently."""
GRADIENT_BOUND = 2e-5
"""Largest difference over largest element, in the first step."""


def write_config(folder: Path, kind: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **SHAPE, **MODELS[kind]}))


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(100 + step % 2)
    text = torch.randint(0, VOCABULARY, (MICRO_BATCHES, 2, SEQUENCE + 1), generator=draw)
    return [(sample[:, :-1].contiguous(), sample[:, 1:].contiguous()) for sample in text]


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def eager_run(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """20 steps of plain `transformers` code on one process: losses, and the first gradients."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    optimizer, losses, first = adam(model), [], {}
    for step in range(STEPS):
        total = 0.0
        for tokens, targets in batches(step):
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICRO_BATCHES
            loss.backward()
            total += float(loss.detach())
        if not step:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, first


def interlaced_runs(folder: str) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """The same on two ranks: losses, the first gradients made whole, and all bits of two strands
    and of one, which runs the graphs that were traced for two."""
    from strange_world import one_strand_of, state_of
    from torch.distributed.device_mesh import init_device_mesh

    from interlace.config import PlanConfig
    from interlace.models.transformers_model import TransformersLoss, build
    from interlace.parallel.plans import apply_published_plan
    from interlace.parallel.tensor import loss_context

    torch.manual_seed(5)
    model = build(folder, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_published_plan(model, mesh)
    start = state_of(model)
    with loss_context(mesh):
        step = interlace.compile_step(
            TransformersLoss(model),
            lambda module, tokens, targets: module(tokens, targets),
            batches(0)[0],
            mesh=mesh,
            config=PlanConfig(search="list", cluster="h100"),
        )
    assert step.plan.schedule == "two_strand"
    losses, first, two = run_of(step, model)
    one = one_strand_of(step, model, start)
    assert one.plan.schedule == "one_strand"
    return losses, first, [two, run_of(one, model)[2]]


def run_of(
    step: interlace.Step, model: torch.nn.Module
) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Losses, the first gradients made whole, and all bits of 20 steps."""
    from strand_world import bits

    optimizer, losses, first, seen = adam(model), [], {}, []
    for index in range(STEPS):
        losses.append(float(step(batches(index))))
        if not index:
            first = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        seen += [bits(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, first, " ".join(seen + [bits(p) for p in model.parameters()])


def train(folders: dict[str, str]) -> dict[str, dict]:
    """What a rank finds out about each kind of model."""
    with gloo_group(timeout_s=60):
        return {kind: compare(folder) for kind, folder in folders.items()}


def compare(folder: str) -> dict:
    wanted, gradients = eager_run(folder)
    losses, found, (two, one) = interlaced_runs(folder)
    errors = {
        name: float((found[name] - wanted_).abs().max() / wanted_.abs().max())
        for name, wanted_ in gradients.items()
    }
    return {
        "bitwise": one == two,
        "losses": max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)),
        "learned": wanted[0] - wanted[-1],
        "gradients": errors,
    }


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict]]:
    """By kind that was asked for, what each rank saw."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in asked(request, "kind")}
    for kind, folder in folders.items():
        write_config(folder, kind)
    texts = {kind: str(folder) for kind, folder in folders.items()}
    results = run_ranks("test_hugging_face:train", 2, args=[texts], timeout_s=220)
    return {kind: [result.value[kind] for result in results] for kind in folders}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=wide_unless(kind in QUICK_MODELS)) for kind in MODELS]
)
def test_unmodified_models_train_as_their_own_code_does(
    kind: str, found: dict[str, list[dict]]
) -> None:
    """20 steps at tp2: losses and first gradients equal plain `transformers` on one process
    within a bound, and two strands give the bits of one."""
    for rank in found[kind]:
        assert rank["bitwise"]
        assert rank["learned"] > 0.5
        assert rank["losses"] < LOSS_BOUND
        assert len(rank["gradients"]) >= 9
        assert max(rank["gradients"].values()) < GRADIENT_BOUND, rank["gradients"]
