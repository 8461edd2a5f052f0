"""Pipelines of unmodified models of transformers, in float64 against plain eager code: decoders,
and an encoder whose output every layer of a decoder reads, over edges between any two stages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from test_compile_step import QUICK, near
from test_folded import logits_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import interlace


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    torch.manual_seed(2)
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends)).double().eval()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(2)
    return LlamaForCausalLM(config).double()


def t5() -> nn.Module:
    """One embedding for encoder, decoder and head."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(2)
    return T5ForConditionalGeneration(config).double()


def labelled(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return module(input_ids=x, labels=y).loss


MODELS: list[tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = [
    (gpt2, logits_loss),
    (llama, logits_loss),
    (t5, labelled),
]


def tokens(count: int) -> list[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(64, (2, 8), generator=draw) for _ in "xy") for _ in range(count)]


def eager(
    module: nn.Module, loss_fn: Callable[..., Tensor], batches: list[tuple[Tensor, ...]]
) -> dict[str, Tensor]:
    """Gradients of the mean loss, by plain autograd on one process; and the losses."""
    losses = [loss_fn(module, *batch) for batch in batches]
    (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {**found, "losses": torch.stack(losses).detach()}


def models_of(ranks: int) -> list[Any]:
    """Two ranks have two chunks each, so that T5 has far edges; on four it takes half a minute."""
    return [each for each in MODELS if ranks == 2 or each[0] is not t5]


def of_transformers(schedule: str) -> dict[str, Any]:
    """By model: the gradients that this rank has, whether they are eager's within 1e-10, and which
    chunks hand something to which."""
    with gloo_group(60):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
        batches = tokens(4)
        found: dict[str, Any] = {}
        for make, loss_fn in models_of(dist.get_world_size()):
            right = eager(make(), loss_fn, batches)
            module = make()
            step = interlace.compile_step(
                module, loss_fn, batches[0], mesh=mesh, schedule=schedule, config=QUICK
            )
            step(batches)
            own = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            norm = interlace.clip_grad_norm_(step, 1e-3)
            exact = torch.nn.utils.get_total_norm([right[n] for n in right if n != "losses"])
            clipped = interlace.clip_grad_norm_(step, 1.0)
            own = {name: gradient / (1e-3 / (exact + 1e-6)) for name, gradient in own.items()}
            named = {**own, "losses": torch.stack(step.losses)}
            assert step.strands.handovers is not None
            found[make.__name__] = {
                "near": near(named, {name: right[name] for name in named}),
                "norms": bool(abs(norm / exact - 1) < 1e-12 and abs(clipped / 1e-3 - 1) < 1e-2),
                "own": sorted(own),
                "all": sorted(set(right) - {"losses"}),
                "edges": sorted(step.strands.handovers.edges),
            }
        return found


@pytest.mark.parametrize(("schedule", "ranks"), [("zb_v", 2), ("folded", 2), ("one_f_one_b", 4)])
def test_unmodified_models(schedule: str, ranks: int) -> None:
    """A GPT-2 with a tied head, a Llama, and a T5, whose encoder's output goes to chunks far behind
    it, and their gradients back."""
    results = run_ranks("test_pipeline_transformers:of_transformers", ranks, args=[schedule],
                        timeout_s=200)  # fmt: skip
    for make, _ in models_of(ranks):
        of_ranks = [result.value[make.__name__] for result in results]
        assert all(each["near"] and each["norms"] for each in of_ranks), make.__name__
        assert sorted({n for each in of_ranks for n in each["own"]}) == of_ranks[0]["all"]
        assert all(0 < len(each["own"]) < len(each["all"]) for each in of_ranks)
    if ranks == 2:
        edges = results[0].value["t5"]["edges"]
        assert any(to - source > 1 for source, to in edges), edges
