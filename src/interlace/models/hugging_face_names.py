"""Which tensor of a Hugging Face checkpoint each parameter of our models is.

`*` stands for the number of a layer, `#` for that of an expert. Rotary positions pair (i, i + E/2)
on both sides, so Llama's query and key rows need no permutation.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from interlace.errors import InputError


@dataclass(frozen=True, slots=True)
class StoredPart:
    """All of a stored tensor, one of equal parts of it, or several stored tensors as one."""

    tensor: str
    """Its name; with `#`, the number of an expert, one tensor for each slice of ours along the
    first dimension."""
    transposed: bool = False
    """Stored as [inputs, outputs], as GPT-2's layers are."""
    part: int = 0
    """Which of `parts` equal parts of the stored tensor along our dimension `dim`."""
    parts: int = 1
    dim: int = 0
    longer: bool = False
    """The stored tensor may have more rows; the first are taken."""

    def tensors(self, rows: int) -> list[str]:
        """The stored tensors that make up a parameter of so many rows."""
        if "#" not in self.tensor:
            return [self.tensor]
        return [self.tensor.replace("#", str(row)) for row in range(rows)]


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is stored."""

    architecture: str
    """Name in `interlace.models`."""
    model_type: str
    class_name: str
    """Of the causal language model in `transformers`."""
    prefix: str
    """Before all names but the head's; checkpoints of the bare model lack it."""
    pieces: dict[str, StoredPart]
    """By name of our parameter."""
    ignored: re.Pattern[str]
    """Stored names that are no weights: masks and rotary tables."""
    fused: dict[str, StoredPart] = field(default_factory=dict)
    """Pieces that lie elsewhere where all experts of a layer are in one tensor, as `transformers` 5
    holds them in memory."""


def _linears(ours: str, theirs: str) -> dict[str, StoredPart]:
    """Weight and bias of a layer of GPT-2, which stores weights transposed."""
    return {
        f"{ours}.weight": StoredPart(f"{theirs}.weight", transposed=True),
        f"{ours}.bias": StoredPart(f"{theirs}.bias"),
    }


def _norms(ours: str, theirs: str) -> dict[str, StoredPart]:
    return {f"{ours}.{kind}": StoredPart(f"{theirs}.{kind}") for kind in ("weight", "bias")}


def _fused(ours: tuple[str, ...], theirs: str) -> dict[str, StoredPart]:
    found = {}
    for part, name in enumerate(ours):
        for kind in ("weight", "bias"):
            piece = StoredPart(f"{theirs}.{kind}", kind == "weight", part, len(ours))
            found[f"{name}.{kind}"] = piece
    return found


_ATTENTION = "blocks.*.attention"
"""Name of the attention of every layer in our models."""
_LLAMA = {
    "embedding.weight": StoredPart("model.embed_tokens.weight"),
    "blocks.*.attention_norm.weight": StoredPart("model.layers.*.input_layernorm.weight"),
    f"{_ATTENTION}.query.weight": StoredPart("model.layers.*.self_attn.q_proj.weight"),
    f"{_ATTENTION}.key.weight": StoredPart("model.layers.*.self_attn.k_proj.weight"),
    f"{_ATTENTION}.value.weight": StoredPart("model.layers.*.self_attn.v_proj.weight"),
    f"{_ATTENTION}.output.weight": StoredPart("model.layers.*.self_attn.o_proj.weight"),
    "blocks.*.ffn_norm.weight": StoredPart("model.layers.*.post_attention_layernorm.weight"),
    "blocks.*.ffn.gate.weight": StoredPart("model.layers.*.mlp.gate_proj.weight"),
    "blocks.*.ffn.up.weight": StoredPart("model.layers.*.mlp.up_proj.weight"),
    "blocks.*.ffn.down.weight": StoredPart("model.layers.*.mlp.down_proj.weight"),
    "norm.weight": StoredPart("model.norm.weight"),
    "head.weight": StoredPart("lm_head.weight"),
}
"""Where `LlamaForCausalLM` stores each parameter of our Llama."""
_BIASES = {
    f"{ours}.bias": StoredPart(piece.tensor.replace(".weight", ".bias"))
    for ours, piece in [(name.removesuffix(".weight"), each) for name, each in _LLAMA.items()]
    if "attention" in ours or ours.endswith(("norm", "head"))
}
"""Where models like Llama store biases of attention, norms and head."""
_HEAD_NORMS = {
    f"{_ATTENTION}.query_norm.weight": StoredPart("model.layers.*.self_attn.q_norm.weight"),
    f"{_ATTENTION}.key_norm.weight": StoredPart("model.layers.*.self_attn.k_norm.weight"),
}
"""Where models like Llama store the norms of heads."""


def _experts(layer: str, gate: str, up: str, down: str) -> dict[str, StoredPart]:
    """All parameters of a model of experts whose layers of experts are stored below `layer`."""
    return {
        **_LLAMA,
        **_BIASES,
        **_HEAD_NORMS,
        "blocks.*.ffn.router.weight": StoredPart(f"{layer}.gate.weight"),
        "blocks.*.ffn.experts.gate": StoredPart(f"{layer}.experts.#.{gate}.weight"),
        "blocks.*.ffn.experts.up": StoredPart(f"{layer}.experts.#.{up}.weight"),
        "blocks.*.ffn.experts.down": StoredPart(f"{layer}.experts.#.{down}.weight"),
    }


def _fused_experts(router: str) -> dict[str, StoredPart]:
    """The parameters that lie elsewhere in memory, and in files that are saved as it is."""
    layer = "model.layers.*.mlp"
    both = f"{layer}.experts.gate_up_proj"
    return {
        "blocks.*.ffn.router.weight": StoredPart(f"{layer}.{router}.weight"),
        "blocks.*.ffn.experts.gate": StoredPart(both, part=0, parts=2, dim=1),
        "blocks.*.ffn.experts.up": StoredPart(both, part=1, parts=2, dim=1),
        "blocks.*.ffn.experts.down": StoredPart(f"{layer}.experts.down_proj"),
    }


_MIXTRAL = _experts("model.layers.*.block_sparse_moe", "w1", "w3", "w2")
"""Where `MixtralForCausalLM` and `PhimoeForCausalLM` store each parameter of our model."""
_QWEN3 = _experts("model.layers.*.mlp", "gate_proj", "up_proj", "down_proj")
"""The same of `Qwen3MoeForCausalLM`."""
_GPT2 = {
    "embedding.weight": StoredPart("transformer.wte.weight"),
    "positions.weight": StoredPart("transformer.wpe.weight", longer=True),
    **_norms("blocks.*.attention_norm", "transformer.h.*.ln_1"),
    **_fused(
        (f"{_ATTENTION}.query", f"{_ATTENTION}.key", f"{_ATTENTION}.value"),
        "transformer.h.*.attn.c_attn",
    ),
    **_linears(f"{_ATTENTION}.output", "transformer.h.*.attn.c_proj"),
    **_norms("blocks.*.ffn_norm", "transformer.h.*.ln_2"),
    **_linears("blocks.*.ffn.up", "transformer.h.*.mlp.c_fc"),
    **_linears("blocks.*.ffn.down", "transformer.h.*.mlp.c_proj"),
    **_norms("norm", "transformer.ln_f"),
    "head.weight": StoredPart("lm_head.weight"),
}
"""Where `GPT2LMHeadModel` stores each parameter of our GPT."""

_ROTARY = re.compile(r".*\.rotary_emb\.inv_freq")
"""Finds the tables of rotary frequencies that some Llama checkpoints hold."""
_MASKS = re.compile(r".*\.attn\.(masked_)?bias")
"""Finds the causal masks that some GPT-2 checkpoints hold for each layer."""
FAMILIES = (
    Family("llama", "llama", "LlamaForCausalLM", "model.", _LLAMA, _ROTARY),
    Family("gpt", "gpt2", "GPT2LMHeadModel", "transformer.", _GPT2, _MASKS),
    Family(
        "moe", "mixtral", "MixtralForCausalLM", "model.", _MIXTRAL, _ROTARY, _fused_experts("gate")
    ),
    Family(
        "moe", "qwen3_moe", "Qwen3MoeForCausalLM", "model.", _QWEN3, _ROTARY, _fused_experts("gate")
    ),
    Family(
        "moe", "phimoe", "PhimoeForCausalLM", "model.", _MIXTRAL, _ROTARY, _fused_experts("router")
    ),
)
"""The forms of checkpoints that are read and written."""


def pieces(family: Family, names: Iterable[str], *, fused: bool = False) -> dict[str, StoredPart]:
    """The stored piece of each of our parameter `names`. Raises InputError if they are of another
    architecture."""
    known = {**family.pieces, **(family.fused if fused else {})}
    found = {}
    for name in names:
        layer = re.search(r"\d+", name)
        number = layer[0] if layer else "*"
        piece = known.get(name.replace(number, "*", 1))
        if piece is None:
            raise InputError(
                f"{name} is no parameter of a {family.architecture} model",
                hint=f"set model.architecture to {family.architecture}, the checkpoint's",
            )
        found[name] = replace(piece, tensor=piece.tensor.replace("*", number))
    return found
