"""Plans of `transformers` models: what they do not say about gradients is found by watching the
model, and folders, models and plans that cannot be used are refused, each with its reason.

Wide are other pairs of shared weights and tensor parallelism; `test_data_parallel.py` has all
of ours.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from interlace.errors import InputError
from interlace.graphs.torch_private import init_fake_world
from interlace.models.transformers_model import build, published_sizes
from interlace.parallel.plans import apply_published_plan, roles_of
from interlace.parallel.split_values import SplitValues
from interlace.train.model_flops import counted_flops_per_token
from wide import WIDE

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make(folder: Path, kind: str, **changes: object) -> nn.Module:
    text = json.dumps({"model_type": kind, **SHAPE, **changes})
    (folder / "config.json").write_text(text)
    return build(str(folder), vocab_size=32, sequence_length=16)


@pytest.fixture
def world() -> Iterator[None]:
    """Four ranks, of which only this one exists."""
    init_fake_world(4)
    yield
    dist.destroy_process_group()


def lay_out(model: nn.Module, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (4 // ranks, ranks), mesh_dim_names=("dp", "tp"))["tp"]
    apply_published_plan(model, mesh)


def test_every_parameter_is_laid_out(tmp_path: Path, world: None) -> None:
    """Column and row layers, head and embedding are split, all else is whole; names stay, a shared
    weight stays shared, and a rank's part keeps no memory of the rest."""
    model = make(tmp_path, "qwen3", tie_word_embeddings=True)
    names = [name for name, _ in model.named_parameters()]
    lay_out(model, 2)
    parameters = dict(model.named_parameters())
    assert list(parameters) == names
    assert (
        model.get_output_embeddings()._parameters["weight"]
        is (model.get_input_embeddings()._parameters["weight"])
    )
    layouts = {name.rpartition("0.")[2]: p.placements for name, p in parameters.items()}
    assert layouts["self_attn.q_proj.weight"] == (Shard(0),)
    assert layouts["mlp.down_proj.weight"] == (Shard(1),)
    assert layouts["self_attn.q_norm.weight"] == (Replicate(),)
    assert layouts["model.embed_tokens.weight"] == (Shard(0),)
    for parameter in parameters.values():
        part = parameter.to_local().detach()
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_partial_gradients_and_shared_inputs_are_found(tmp_path: Path) -> None:
    """The norms of the heads see one rank's heads only; query, key and value share an input."""
    model = make(tmp_path, "qwen3")
    found = SplitValues(model, roles_of(model))
    found.watch(torch.zeros(1, 8, dtype=torch.int64))
    attention = "model.layers.0.self_attn"
    assert found.partial == {f"{attention}.{name}_norm.weight" for name in "qk"}
    shared = found.shared_inputs()
    assert shared["model.layers.0.input_layernorm"] == {f"{attention}.{n}_proj" for n in "qkv"}
    assert len(shared) == 2


SHARED = {"qwen3": ["zero3x2 tp2"], "gpt2": ["zero1x4"]}
MORE_SHARED = {
    "qwen3": ["zero1x2 tp2", "zero3x2 tp2 each", "rep2 zero3x2"],
    "gpt2": ["zero3x4"],
}
FLOAT32_BOUND = 1e-5
"""Of gradients that are float64, but for norms that their own code takes in float32."""


@pytest.mark.parametrize(
    "shared", [pytest.param(SHARED, id="4"), pytest.param(MORE_SHARED, marks=WIDE, id="4, wide")]
)
def test_data_parallel_ranks_share_models_of_others(
    tmp_path: Path, shared: dict[str, list[str]]
) -> None:
    """Unmodified models with a tied head, their weights sharded (ZeRO-1 and ZeRO-3) with and
    without tensor parallelism: two strands have the bits of one, and gradients are those of their
    own code on one process over all micro-batches."""
    changes = {
        "qwen3": {"tie_word_embeddings": True, "initializer_range": 0.2},
        "gpt2": {"n_head": 4, "n_embd": 16, "n_layer": 1, "n_positions": 64, "n_inner": 32}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    cases = []
    for kind, layouts in shared.items():
        (tmp_path / kind).mkdir()
        make(tmp_path / kind, kind, vocab_size=64, **changes[kind])
        cases += [(layout, str(tmp_path / kind)) for layout in layouts]
    results = run_ranks("test_data_parallel:table", 4, args=[cases], timeout_s=300)
    assert [len(result.value) for result in results] == [len(cases)] * 4
    for facts in (facts for result in results for facts in result.value):
        assert facts["different"] == [], facts
        assert facts["strands"][1] < FLOAT32_BOUND, facts
        assert facts["eager"][1] < FLOAT32_BOUND, facts


def test_work_is_counted_from_the_model_itself(tmp_path: Path) -> None:
    """6 FLOP per weight of a matmul and token, a tied head being one, and attention's scores; of
    experts it cannot be told."""
    folder = str(tmp_path)
    make(tmp_path, "qwen3", tie_word_embeddings=True)
    layers, width, inner, size = 1, 16, 32, 4
    projections = width * size * (4 + 2 + 2 + 4) + 3 * width * inner
    wanted = 6 * (layers * projections + 32 * width) + 12 * layers * 4 * size * 64
    random = torch.get_rng_state()
    assert counted_flops_per_token(folder, 32, 64) == (wanted, "")
    assert torch.equal(torch.get_rng_state(), random)
    make(tmp_path, "qwen3", tie_word_embeddings=False)
    assert counted_flops_per_token(folder, 32, 64) == (wanted, "")
    make(tmp_path, "mixtral", num_local_experts=2)
    reason = "a token meets only some of its experts"
    assert counted_flops_per_token(folder, 32, 64)[0] is None
    assert counted_flops_per_token(folder, 32, 64)[1].startswith(reason)
    assert published_sizes(folder) == ("mixtral", 1, 16)


def test_work_of_an_unusual_model_is_counted_or_not_known(tmp_path: Path) -> None:
    """Experts in a table within config.json, layers without attention, and code that needs values:
    by a formula over all weights each got a number, and a wrong one."""
    from transformers import DbrxConfig, MambaConfig

    ffn = {"moe_num_experts": 4, "moe_top_k": 1, "ffn_hidden_size": 32}
    DbrxConfig(d_model=16, n_heads=4, n_layers=1, max_seq_len=64, vocab_size=32,
               ffn_config=ffn).save_pretrained(tmp_path / "dbrx")  # fmt: skip
    flops, reason = counted_flops_per_token(str(tmp_path / "dbrx"), 32, 64)
    assert flops is None
    assert "moe_num_experts = 4" in reason
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "state_size": 4}
    MambaConfig(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0).save_pretrained(
        tmp_path / "mamba"
    )
    flops, reason = counted_flops_per_token(str(tmp_path / "mamba"), 32, 8)
    inner, rank, state = 32, 1, 4
    weights = 2 * (16 * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * 16)
    assert flops is not None
    assert flops >= 6 * (weights + 16 * 32)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "bert", "is_decoder": false}')
    assert counted_flops_per_token(str(tmp_path / "broken"), 32, 10**6)[0] is None


def test_a_plan_that_meets_whole_values_is_refused(tmp_path: Path) -> None:
    """Without the row layer's role split values would be added to whole ones; with a row layer
    alone whole values would be taken for split ones."""
    model = make(tmp_path, "llama")
    roles = roles_of(model)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    torn = {name: role for name, role in roles.items() if not name.endswith("down_proj")}
    with pytest.raises(InputError, match="combines values that are split"):
        SplitValues(model, torn).watch(tokens)
    alone = {name: role for name, role in roles.items() if name.endswith("down_proj")}
    with pytest.raises(InputError, match="expects split ones"):
        SplitValues(model, alone).watch(tokens)
    assert model.training


@pytest.mark.parametrize(
    ("kind", "changes", "ranks", "why"),
    [
        ("llama", {}, 4, "the 2 key/value heads of '.*k_proj' cannot be divided"),
        ("llama", {"vocab_size": 33}, 2, "the 33 rows of '.*' cannot be divided"),
        ("gpt2", {"n_head": 4, "n_embd": 16}, 2, "GPT2LMHeadModel publishes no tensor-parallel"),
        ("mixtral", {"num_local_experts": 2}, 2, "the style '.*', which is not supported"),
    ],
)
def test_unusable_plans_are_refused(
    tmp_path: Path, world: None, kind: str, changes: dict, ranks: int, why: str
) -> None:
    """The reason names the layer and the number, or the style."""
    model = make(tmp_path, kind, **changes)
    with pytest.raises(InputError, match=why):
        lay_out(model, ranks)


def test_unusable_folders_are_refused(tmp_path: Path) -> None:
    """No config, an unknown kind, too few tokens or positions, weights in a pickle."""
    with pytest.raises(InputError, match=r"has no config.json"):
        build(str(tmp_path), vocab_size=32, sequence_length=16)
    with pytest.raises(InputError, match="cannot be used"):
        make(tmp_path, "no-such-model")
    with pytest.raises(InputError, match="knows 31 tokens, and the tokenizer has 32"):
        make(tmp_path, "llama", vocab_size=31)
    with pytest.raises(InputError, match="16 is longer than the 8 positions"):
        make(tmp_path, "llama", max_position_embeddings=8)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(InputError, match=r"pytorch_model.bin, a pickle"):
        make(tmp_path, "llama")


def test_weights_of_the_folder_are_taken(tmp_path: Path) -> None:
    """Bit by bit, in float32 and in training mode, though the file may be of another type."""
    saved = make(tmp_path, "llama").to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    torch.manual_seed(1)
    model = build(str(tmp_path), vocab_size=32, sequence_length=16)
    assert model.training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved.get_parameter(name).float())
