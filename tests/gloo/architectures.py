"""Architectures that this project did not write, at sizes of a few thousand weights.

Those of `transformers` are built from its configuration classes, drawn at random and without
dropout; the others are stock layers of torch. A new one is a line in `CASES`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from strange_modules import words
from strange_world import Batch, Case, call, squares
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Names that most configurations of transformers share."""
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BOUND = 1e-5
"""Of gradients in float32, which experts have; all others are in float64, with the bound of `Case`.
"""


def model(kind: str, head: str = "ForCausalLM", **changes: Any) -> Callable[[], nn.Module]:
    """A model of transformers whose configuration has `SIZES` and these changes; a change to None
    leaves a name out. Weights are in float64, norms and biases drawn too."""

    def made() -> nn.Module:
        import transformers

        given = {name: value for name, value in {**SIZES, **changes}.items() if value is not None}
        config = getattr(transformers, f"{kind}Config")(**given)
        return drawn(getattr(transformers, f"{kind}{head}")(config))

    return made


def drawn(module: nn.Module) -> nn.Module:
    """The module in float64 and in train mode, its weights moved off the values (0 and 1) at which
    a missing gradient would go unseen."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module.double().train()


def called(make: Callable[[], nn.Module], batch: Callable[[], Batch]) -> Callable[[], nn.Module]:
    """The module after a forward: at its first one it sets what the others find."""

    def made() -> nn.Module:
        module = make()
        with torch.no_grad():
            module.eval()(batch()[0])
        return module.train()

    return made


def single(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The module in float32: grouped matmuls of torch know no float64."""
    return lambda: make().float()


def causal(module: nn.Module, tokens: Tensor) -> Tensor:
    return module(input_ids=tokens, labels=tokens, use_cache=False).loss


def labelled(module: nn.Module, *batch: Tensor) -> Tensor:
    """Inputs of any name, and labels behind them."""
    return module(batch[0], labels=batch[-1]).loss


def masked(module: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """With a mask of padding, as a collator gives it."""
    return module(input_ids=tokens, attention_mask=(tokens != 0).long(), labels=labels).loss


def two_texts() -> Batch:
    return words(2, 6, of=24)() + words(2, 6, of=24)()


def one_class_each() -> Batch:
    return words(2, 6, of=24)() + words(2, of=2)()


def pictures() -> Batch:
    return (torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.randint(0, 2, (2,)))


def sound() -> Batch:
    """Mel bands of 16 frames, and words."""
    return (torch.randn(2, 8, 16, dtype=torch.float64), *words(2, 5, of=24)())


def pairs() -> Batch:
    """Texts and their pictures. The text of CLIP ends with the largest token."""
    text = torch.randint(3, 23, (2, 6))
    text[:, -1] = 23
    return (text, torch.randn(2, 3, 8, 8, dtype=torch.float64))


def noisy() -> Batch:
    """Pictures, how noisy each is, and a text that each is of."""
    seen, text = torch.randn(2, 2, 4, 4), torch.randn(2, 3, 6)
    return (seen.double(), torch.randint(0, 1000, (2,)), text.double())


def waves() -> Batch:
    """Sound as it is sampled, and one class each."""
    return (torch.randn(2, 64, dtype=torch.float64), *words(2, of=2)())


def contrast(module: nn.Module, text: Tensor, seen: Tensor) -> Tensor:
    return module(input_ids=text, pixel_values=seen, return_loss=True).loss


def gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4}
    return drawn(Gemma3ForCausalLM(Gemma3TextConfig(**sizes)))


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    part = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    part |= {"num_attention_heads": 2, "projection_dim": 8}
    text = {
        **part,
        "vocab_size": 24,
        "max_position_embeddings": 8,
        "bos_token_id": 22,
        "eos_token_id": 23,
    }
    vision = {**part, "image_size": 8, "patch_size": 4}
    return drawn(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)))


class Sequences(nn.Module):
    """`nn.Transformer` from sequence to sequence, told that its mask is causal, or looking."""

    def __init__(self, *, told: bool) -> None:
        super().__init__()
        self.told = told or None
        self.table = nn.Embedding(24, 16)
        self.body = nn.Transformer(16, 2, 1, 1, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 24)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
        states = self.body(
            self.table(source), self.table(target), tgt_mask=mask, tgt_is_causal=self.told
        )
        logits = self.head(states)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


class Residual(nn.Module):
    """A block of ResNet with group norms: two convolutions and a shortcut of stride 2."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(2, outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.GroupNorm(2, outside),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inside, outside, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x), inplace=True)


class Timed(nn.Module):
    """A residual block of a diffusion model, shifted by an embedding of the time."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(2, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1)
        )
        self.shift = nn.Linear(time, outside)
        self.second = nn.Sequential(
            nn.GroupNorm(2, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, padding=1)
        )
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.first(x) + self.shift(nn.functional.silu(time))[:, :, None, None]
        return self.second(inner) + self.skip(x)


class Denoiser(nn.Module):
    """A U-Net as of latent diffusion: time, a text that the middle looks at, a long skip."""

    def __init__(self, width: int = 4, text: int = 6) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 8), nn.SiLU(), nn.Linear(8, 8))
        self.start = nn.Conv2d(2, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = Timed(2 * width, 2 * width, 8)
        self.norm = nn.GroupNorm(2, 2 * width)
        self.look = nn.MultiheadAttention(2 * width, 2, kdim=text, vdim=text, batch_first=True)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.end = Timed(2 * width, 2, 8)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(-4.6 * torch.arange(2, device=x.device))
        when = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))
        wide = self.start(x)
        deep = self.middle(self.down(wide), when)
        tokens = self.norm(deep).flatten(2).transpose(1, 2)
        seen = self.look(tokens, text, text, need_weights=False)[0]
        deep = deep + seen.transpose(1, 2).view_as(deep)
        back = self.up(nn.functional.interpolate(deep, scale_factor=2.0, mode="nearest"))
        return self.end(torch.cat([wide, back], 1), when)


def listener() -> nn.Module:
    """Wav2Vec 2.0 as it is fine-tuned: convolutions frozen, no layer left out."""
    module = model("Wav2Vec2", "ForSequenceClassification", **WAV2VEC2, **NO_DROPOUT)()
    module.freeze_feature_encoder()
    return module


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), Residual(4, 8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip


def classes(module: nn.Module, seen: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(seen), wanted)


class Recurrent(nn.Module):
    """A classifier of texts with a recurrent layer in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 8)
        self.body = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.table(tokens))[0][:, -1])


EXPERTS = {"num_experts_per_tok": 1, "num_key_value_heads": 1}
TEXT = words(2, 6, of=24)
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
SEQ2SEQ = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
           "dropout": 0.0, "decoder_start_token_id": 1}  # fmt: skip
GPT2 = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
VISION = {"image_size": 8, "patch_size": 4, "num_labels": 2, **NO_DROPOUT}
SWIN = {"patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 2,
        "num_attention_heads": None, "num_hidden_layers": None, "drop_path_rate": 0.0}  # fmt: skip
WAV2VEC2 = {"conv_dim": [8, 8], "conv_stride": [4, 2], "conv_kernel": [6, 2], "layerdrop": 0.0,
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "classifier_proj_size": 8,
            "num_conv_pos_embedding_groups": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0,
            "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
            "feat_extract_norm": "layer", "apply_spec_augment": False}  # fmt: skip
CASES = [
    # Language models, decoders only. More of them are in `PLANNED`.
    Case("Llama", model("Llama", num_key_value_heads=1), TEXT, causal),
    Case("Mistral", model("Mistral", num_key_value_heads=1, sliding_window=4), TEXT, causal),
    Case("Qwen2", model("Qwen2", num_key_value_heads=1), TEXT, causal),
    Case("Qwen3", model("Qwen3", num_key_value_heads=1, head_dim=8), TEXT, causal),
    Case("Gemma 2", model("Gemma2", num_key_value_heads=1, head_dim=8, num_hidden_layers=2,
                          sliding_window=4), TEXT, causal),
    Case("Gemma 3", gemma3, TEXT, causal),
    Case("Phi-3", model("Phi3", num_key_value_heads=1), TEXT, causal),
    Case("GPT-2", model("GPT2", "LMHeadModel", **GPT2), TEXT, causal),
    Case("GPT-NeoX", model("GPTNeoX"), TEXT, causal),
    Case("OPT", model("OPT", ffn_dim=24, word_embed_proj_dim=16, dropout=0.0), TEXT, causal),
    Case("BLOOM", model("Bloom"), TEXT, causal),
    Case("Falcon", model("Falcon"), TEXT, causal),
    Case("StableLM", model("StableLm", num_key_value_heads=1), TEXT, causal),
    # Experts.
    Case("Mixtral", single(model("Mixtral", num_local_experts=2, **EXPERTS)), TEXT, causal,
         bound=BOUND),
    Case("Qwen3-MoE", single(model("Qwen3Moe", num_experts=2, moe_intermediate_size=8, **EXPERTS)),
         TEXT, causal, bound=BOUND),
    # States instead of attention.
    Case("Mamba", model("Mamba", state_size=4), TEXT, causal),
    Case("RWKV", model("Rwkv", attention_hidden_size=16, num_hidden_layers=2), TEXT, causal),
    # Encoders.
    Case("BERT", model("Bert", "ForMaskedLM", **NO_DROPOUT), two_texts, masked),
    Case("RoBERTa", model("Roberta", "ForSequenceClassification", **NO_DROPOUT), one_class_each,
         masked),
    Case("DistilBERT", model("DistilBert", "ForTokenClassification", dim=16, n_layers=1, n_heads=2,
                             hidden_dim=24, dropout=0.0, attention_dropout=0.0),
         lambda: words(2, 6, of=24)() + words(2, 6, of=2)(), masked),
    Case("DeBERTa v2", model("DebertaV2", "ForMaskedLM", relative_attention=True,
                             pos_att_type=["p2c", "c2p"], **NO_DROPOUT), two_texts, masked),
    Case("ELECTRA", model("Electra", "ForSequenceClassification", embedding_size=8, **NO_DROPOUT),
         one_class_each, masked),
    Case("ModernBERT", model("ModernBert", "ForMaskedLM", num_hidden_layers=2, cls_token_id=1,
                             sep_token_id=2), two_texts, masked),
    # From sequence to sequence.
    Case("T5", model("T5", "ForConditionalGeneration", **T5, decoder_start_token_id=0), two_texts,
         labelled),
    Case("BART", model("Bart", "ForConditionalGeneration", **SEQ2SEQ), two_texts, labelled),
    Case("Whisper", model("Whisper", "ForConditionalGeneration", **SEQ2SEQ, num_mel_bins=8,
                          max_source_positions=8, max_target_positions=8), sound, labelled),
    # Pictures.
    Case("ViT", model("ViT", "ForImageClassification", **VISION), pictures, labelled),
    Case("DINOv2", model("Dinov2", "ForImageClassification", **VISION), pictures, labelled),
    Case("ConvNeXt", model("ConvNext", "ForImageClassification", hidden_sizes=[8, 8], depths=[1, 1],
                           num_stages=2, patch_size=2, image_size=8), pictures, labelled),
    Case("CLIP", clip, pairs, contrast),
    Case("Swin", model("Swin", "ForImageClassification", **{**VISION, **SWIN}), pictures, labelled),
    # Sound.
    Case("Wav2Vec 2.0", called(listener, waves), waves, labelled),
    Case("Wav2Vec 2.0 before its first call", listener, waves, labelled,
         refused="installs hooks.*output_capturing.py:.*hint: run the model once"),
    # Looks at values of its inputs.
    Case("Longformer", model("Longformer", "ForMaskedLM", attention_window=4, **NO_DROPOUT),
         lambda: words(2, 8, of=24)() + words(2, 8, of=24)(), masked,
         refused="data-dependent.*modeling_longformer.py:.*if is_global_attn"),
    # Stock layers of torch.
    Case("denoising U-Net", lambda: drawn(Denoiser()), noisy, squares),
    Case("nn.Transformer", lambda: drawn(Sequences(told=True)), two_texts, call),
    Case("nn.Transformer that looks at its mask", lambda: drawn(Sequences(told=False)), two_texts,
         call, refused="data-dependent.*architectures.py:.*hint: .*tgt_is_causal"),
    Case("residual convolutions", lambda: drawn(convolutional()), pictures, classes),
    Case("LSTM in both directions", lambda: drawn(Recurrent()), one_class_each, classes),
]  # fmt: skip


def published_plan(module: nn.Module, mesh: DeviceMesh) -> None:
    """Lay a model out as `from_pretrained(distributed_config=...)` of transformers does."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = DistributedConfig(tp_size=mesh.size())
    plan = module._resolve_parallel_plans(config)[0]
    known = {name for name, _ in (*module.named_modules(), *module.named_parameters())}
    apply_tensor_parallelism(module, mesh, {name: plan[name] for name in plan if name in known})
    module.tie_weights()


BY_PLAN = " by its plan"
"""Ends the names of such cases."""


def planned(name: str, kind: str, **changes: Any) -> Case:
    """A model with two key/value heads, which two ranks share, by the plan that it publishes."""
    return Case(
        f"{name}{BY_PLAN}", model(kind, num_key_value_heads=2, **changes), TEXT, causal,
        lay_out=published_plan,
    )  # fmt: skip


PLANNED = [
    planned("Llama", "Llama"),
    planned("Mistral", "Mistral"),
    planned("Qwen2", "Qwen2"),
    replace(planned("Qwen3", "Qwen3", head_dim=8), refused="changes Python state: .*q_norm"),
    planned("Gemma", "Gemma", head_dim=8),
    planned("Gemma 2", "Gemma2", head_dim=8),
    planned("Phi-3", "Phi3"),
    planned("OLMo 2", "Olmo2"),
    planned("Granite", "Granite"),
    planned("Cohere", "Cohere"),
    planned("SmolLM 3", "SmolLM3"),
]
"""Two ranks share a layer by the tensor-parallel plan and the code of transformers."""
REPLICAS = (
    "Gemma 3", "GPT-2", "Qwen3", "Mixtral", "Mamba", "RWKV", "BERT", "T5", "ConvNeXt", "CLIP",
    "nn.Transformer", "nn.Transformer that looks at its mask", "LSTM in both directions",
)  # fmt: skip
"""Of these two ranks have copies: of each heading above one or more, those with tied weights, with
grouped matmuls in float32, with buffers, with several losses, and one that is refused. Every module
is traced on one rank; copies add sums of gradients to such graphs, whatever is in them, and
`strange_modules.py` has 70 more of them."""
ON_TWO_RANKS = [case for case in CASES if case.name in REPLICAS] + PLANNED
