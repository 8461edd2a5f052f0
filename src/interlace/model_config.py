"""ModelConfig: the `[model]` of a run file, with its `[model.experts]`.

The docstring under each field is its help text on the command line and in the reference.
`interlace.model_rules` says which values can never work.
"""

from dataclasses import dataclass, field
from typing import Literal

Own = str
"""Code of a user's own, as `module:name` (`own_code`)."""
Architecture = Literal["llama", "gpt", "moe"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of `architecture = "moe"`: feed-forwards of which each token meets a few."""

    count: int = 0
    """Experts in each layer; 0 for a model without any."""
    chosen: int = 2
    """Experts that each token goes to."""
    ffn_width: int = 0
    """Inner size of each expert; 0 takes `model.ffn_width`."""
    shared_width: int = 0
    """Inner size of a feed-forward that every token goes through beside its experts; 0 for none."""
    dense_layers: int = 0
    """So many layers from the first on have a feed-forward of `model.ffn_width`, and no experts."""
    router: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    """How a token chooses: the largest of a `softmax` over all experts (Mixtral, Qwen3) or of a
    `sigmoid` of each (DeepSeek-V3); `sparse_mixer` chooses two, one after the other (Phi-3.5)."""
    renormalise: bool = True
    """`softmax`, `sigmoid`: whether the gates of a token are made to add up to `scale`."""
    jitter: float = 0.01
    """`sparse_mixer`: experts whose logit lies further than twice this share below the largest one
    have no part in its gate."""
    groups: int = 1
    """Equal groups of experts, of which a token may use `groups_kept`: the best by their two best
    experts (`sigmoid`) or by their best one (`softmax`)."""
    groups_kept: int = 1
    """Groups that a token may choose experts of."""
    scale: float = 1.0
    """By what the gates are multiplied."""
    balance: Literal["none", "auxiliary_loss", "bias"] = "none"
    """How tokens are spread over experts: by a loss that is smallest when all experts have equally
    many, or by a bias on the choice that moves after each step (arXiv 2408.15664)."""
    auxiliary_weight: float = 0.001
    """`auxiliary_loss`: by what it is multiplied before it is added to the loss."""
    bias_speed: float = 0.001
    """`bias`: by how much it moves after a step."""
    capacity_factor: float = 0.0
    """An expert takes so many times its equal share of a rank's rows, and the later ones are
    dropped; 0 drops none."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model."""

    source: Literal["interlace", "hugging_face"] = "interlace"
    """`interlace` builds a model of `interlace.models`; `hugging_face` trains the causal language
    model of a `transformers` configuration as it is."""
    config: str = ""
    """Folder with a `config.json`, and weights if there are any. With `source = "interlace"` shape
    and weights come from there (Llama and GPT-2 checkpoints); empty takes the fields below."""
    architecture: Architecture | Own = "llama"
    """Which model of `interlace.models` to build, or a module of your own with the same functions
    (docs/extending.md)."""
    layers: int = 4
    """Number of transformer blocks."""
    width: int = 512
    """Size of the residual stream."""
    heads: int = 8
    """Query heads."""
    kv_heads: int = 8
    """Key and value heads (grouped-query attention when fewer than `heads`)."""
    head_size: int = 0
    """Size of each head (`llama`, `moe`); 0 takes `width / heads`."""
    ffn_width: int = 1408
    """Inner size of the feed-forward layer."""
    vocab_size: int = 0
    """Rows of the embedding; 0 takes the tokenizer's size, or of token ids the largest one + 1."""
    tied_head: bool = False
    """Whether the output head shares the embedding's weight."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""
    rope_scaling: Literal["none", "linear", "llama3", "long"] = "none"
    """How rotary frequencies are stretched for sequences longer than the model was made for."""
    rope_factor: float = 8.0
    """By how much frequencies are divided."""
    rope_low_frequency: float = 1.0
    """`llama3`: turns over the original length below which a frequency is fully divided."""
    rope_high_frequency: float = 4.0
    """`llama3`: turns over the original length above which a frequency is left alone."""
    rope_original_length: int = 8192
    """`llama3`, `long`: sequence length that the model was made for."""
    rope_short_factors: tuple[float, ...] = ()
    """`long`: by what each frequency is divided up to the original length, one for each pair of a
    head (arXiv 2402.13753)."""
    rope_long_factors: tuple[float, ...] = ()
    """`long`: the same for longer sequences, at all of their positions."""
    rope_short_scale: float = 1.0
    """`long`: by what queries and keys are multiplied up to the original length."""
    rope_long_scale: float = 1.0
    """`long`: the same for longer sequences."""
    attention_bias: bool = False
    """Whether the projections of attention have biases (`llama`, `moe`; `gpt` has them always)."""
    query_key_norm: bool = False
    """Whether each query and key head goes through an RMSNorm before it is rotated (`llama`,
    `moe`)."""
    norm: Literal["rms", "layer"] = "rms"
    """`moe`: RMSNorm, or LayerNorm with a bias."""
    head_bias: bool = False
    """`moe`: whether the output head has a bias."""
    norm_eps: float = 1e-5
    """Added to the mean square or variance inside norms."""
    dropout: float = 0.0
    """Probability of dropping an element after attention and feed-forward (GPT)."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)


def head_size_of(model: ModelConfig) -> int:
    """Size of each attention head."""
    return model.head_size or model.width // model.heads


def expert_width_of(model: ModelConfig) -> int:
    """Inner size of each expert."""
    return model.experts.ffn_width or model.ffn_width
