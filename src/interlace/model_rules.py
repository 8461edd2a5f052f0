"""Rules for `[model]` and `[model.experts]`, alone and beside the ranks that share them.

Each raises InputError with the field, the value and what to set.
"""

from interlace.config import DataConfig, ParallelConfig
from interlace.errors import InputError
from interlace.model_config import ExpertsConfig, ModelConfig, expert_width_of, head_size_of

_WITH_EXPERTS = "moe"
"""The architecture of ours that has experts."""
_SPARSE_MIXER_CHOOSES = 2
"""Experts that `sparse_mixer` chooses: it is defined for two (arXiv 2409.12136)."""
_ONLY = {
    "head_size": ("llama", "moe"),
    "attention_bias": ("llama", "moe"),
    "query_key_norm": ("llama", "moe"),
    "norm": ("moe",),
    "head_bias": ("moe",),
}
"""Fields that some of our architectures read, and which."""


def check_shapes(model: ModelConfig, parallel: ParallelConfig, data: DataConfig) -> None:
    """Raise InputError for a model that can never work, or not on ranks that share it so."""
    if model.source == "hugging_face":
        _check_hugging_face(model, parallel)
        return
    _check_model(model, parallel.tensor)
    _check_tensor(model, parallel.tensor, data.sequence_length)
    _check_context(model, parallel, data.sequence_length)


def _check_model(model: ModelConfig, tensor: int) -> None:
    if model.width % model.heads and not model.head_size:
        raise InputError(
            f"model.width = {model.width} is not a multiple of model.heads = {model.heads}",
            hint="set model.width to heads x head size, or model.head_size",
        )
    if model.architecture in ("llama", "moe") and head_size_of(model) % 2:
        raise InputError(
            f"the head size {head_size_of(model)} is odd; rotary positions need pairs",
            hint="set model.head_size, or model.width, to an even multiple of model.heads",
        )
    _check_kinds(model)
    _check_rope(model)
    if model.heads % model.kv_heads:
        raise InputError(
            f"model.heads = {model.heads} is not a multiple of model.kv_heads = {model.kv_heads}",
            hint="set model.kv_heads to a divisor of model.heads",
        )
    if _has_experts(model):
        _check_experts(model, tensor)


def _check_kinds(model: ModelConfig) -> None:
    """Fields that the architecture does not read must be left alone."""
    usual = ModelConfig()
    for name, readers in _ONLY.items():
        value = getattr(model, name)
        ours = model.architecture in ("llama", "gpt", "moe")
        if ours and value != getattr(usual, name) and model.architecture not in readers:
            raise InputError(
                f"model.{name} = {value!r} means nothing to model.architecture = "
                f"{model.architecture!r}",
                hint=f"leave model.{name} out, or set model.architecture to {' or '.join(readers)}",
            )


def _check_rope(model: ModelConfig) -> None:
    low, high = model.rope_low_frequency, model.rope_high_frequency
    if model.rope_scaling == "llama3" and not 0 < low < high:
        raise InputError(
            f"model.rope_low_frequency = {low} must be positive and below "
            f"model.rope_high_frequency = {high}",
            hint="Llama 3.1 has 1 and 4",
        )
    pairs = head_size_of(model) // 2
    for name in ("rope_short_factors", "rope_long_factors"):
        factors = getattr(model, name)
        if model.rope_scaling != "long" and factors:
            raise InputError(
                f"model.{name} has {len(factors)} numbers, and model.rope_scaling = "
                f"{model.rope_scaling!r} reads none",
                hint=f'set model.rope_scaling to "long", or leave model.{name} out',
            )
        fits = len(factors) == pairs and all(0 < each < float("inf") for each in factors)
        if model.rope_scaling == "long" and not fits:
            raise InputError(
                f"model.{name} has {len(factors)} numbers, and the {pairs} pairs of a head need "
                "one positive number each",
                hint="take short_factor and long_factor of the model's config.json",
            )


def _check_experts(model: ModelConfig, tensor: int) -> None:
    experts = model.experts
    _check_numbers(experts)
    if experts.count < 1 or not 1 <= experts.chosen <= experts.count:
        raise InputError(
            f"model.experts.chosen = {experts.chosen} of model.experts.count = {experts.count} "
            "experts cannot be chosen",
            hint="set model.experts.chosen to 1 or more, and to model.experts.count at most",
        )
    if not 0 <= experts.dense_layers < model.layers:
        raise InputError(
            f"model.experts.dense_layers = {experts.dense_layers} leaves none of model.layers = "
            f"{model.layers} layers with experts",
            hint="set model.experts.dense_layers below model.layers",
        )
    _check_groups(experts)
    _check_router(experts)
    _check_capacity(experts)
    _check_split(model, tensor)


def _has_experts(model: ModelConfig) -> bool:
    """Whether the model has experts of ours. Raises InputError where the two fields disagree."""
    ours, count = model.architecture == _WITH_EXPERTS, model.experts.count
    if model.config:  # what it says is checked once it is read
        return ours and count > 0
    if ours and count == 0:
        raise InputError(
            f"model.architecture = {_WITH_EXPERTS!r} needs experts, and model.experts.count = 0",
            hint="set model.experts.count, as in 8, or model.architecture to llama",
        )
    if not ours and model.architecture in ("llama", "gpt") and model.experts != ExpertsConfig():
        raise InputError(
            f"[model.experts] is given (count = {count}), and model.architecture = "
            f"{model.architecture!r} has no experts",
            hint=f"set model.architecture to {_WITH_EXPERTS}, or leave [model.experts] out",
        )
    return ours


def _check_numbers(experts: ExpertsConfig) -> None:
    for name in ("ffn_width", "shared_width", "auxiliary_weight", "capacity_factor", "jitter"):
        value = getattr(experts, name)
        if not 0 <= value < float("inf"):
            raise InputError(
                f"model.experts.{name} = {value!r} must not be negative",
                hint=f"set model.experts.{name} to 0 or more",
            )
    for name in ("groups", "groups_kept", "scale", "bias_speed"):
        value = getattr(experts, name)
        if not 0 < value < float("inf"):
            raise InputError(
                f"model.experts.{name} = {value!r} must be positive",
                hint=f"set model.experts.{name} above 0",
            )


def _check_groups(experts: ExpertsConfig) -> None:
    if experts.count % experts.groups:
        raise InputError(
            f"model.experts.count = {experts.count} cannot be divided into model.experts.groups = "
            f"{experts.groups} equal groups",
            hint="set model.experts.groups to a divisor of model.experts.count; 1 for none",
        )
    each = experts.count // experts.groups
    if experts.groups_kept > experts.groups:
        raise InputError(
            f"model.experts.groups_kept = {experts.groups_kept} is more than model.experts.groups "
            f"= {experts.groups}",
            hint="set model.experts.groups_kept to model.experts.groups at most",
        )
    if experts.groups > 1 and experts.groups_kept * each < experts.chosen:
        raise InputError(
            f"model.experts.groups_kept = {experts.groups_kept} groups of {each} hold "
            f"{experts.groups_kept * each} experts, fewer than model.experts.chosen = "
            f"{experts.chosen}",
            hint="raise model.experts.groups_kept, or lower model.experts.chosen",
        )
    if experts.groups > 1 and experts.router == "sigmoid" and each < 2:
        raise InputError(
            "model.experts.router = 'sigmoid' judges groups by their two best experts, and "
            f"{experts.count} experts in {experts.groups} groups have {each} each",
            hint="set model.experts.groups to half of model.experts.count or less",
        )


def _check_router(experts: ExpertsConfig) -> None:
    if experts.router != "sparse_mixer":
        return
    if experts.chosen != _SPARSE_MIXER_CHOOSES:
        raise InputError(
            f"model.experts.router = 'sparse_mixer' chooses {_SPARSE_MIXER_CHOOSES} experts, and "
            f"model.experts.chosen = {experts.chosen}",
            hint=f"set model.experts.chosen to {_SPARSE_MIXER_CHOOSES}, or another router",
        )
    for name, wrong in (("groups", experts.groups > 1), ("balance", experts.balance == "bias")):
        if wrong:
            raise InputError(
                "model.experts.router = 'sparse_mixer' compares logits, not scores, and cannot go "
                f"with model.experts.{name} = {getattr(experts, name)!r}",
                hint=f"choose the router softmax or sigmoid, or leave model.experts.{name} out",
            )


def _check_capacity(experts: ExpertsConfig) -> None:
    if 0 < experts.capacity_factor < 1 / experts.chosen:
        raise InputError(
            f"model.experts.capacity_factor = {experts.capacity_factor} lets experts take fewer "
            f"rows in all than there are tokens: {experts.capacity_factor} x "
            f"model.experts.chosen = {experts.chosen} is below 1",
            hint="1.25 leaves a quarter of room above the equal share; 0 drops nothing",
        )


def _check_split(model: ModelConfig, tensor: int) -> None:
    shares = {
        "model.experts.ffn_width": expert_width_of(model),
        "model.experts.shared_width": model.experts.shared_width,
    }
    for name, size in shares.items():
        if size % tensor:
            raise InputError(
                f"{name} = {size} cannot be divided among parallel.tensor = {tensor} ranks",
                hint=f"set {name} to a multiple of {tensor}, or parallel.tensor to a divisor",
            )


def _check_hugging_face(model: ModelConfig, parallel: ParallelConfig) -> None:
    """The model's own shape is checked when it is built."""
    if not model.config:
        raise InputError(
            "model.source = 'hugging_face' needs a model",
            hint="set model.config to a folder with a config.json",
        )
    if model.experts != ExpertsConfig():
        raise InputError(
            "[model.experts] and model.source = 'hugging_face' are both given, and that model has "
            "the experts that its config.json says",
            hint="leave [model.experts] out",
        )
    if parallel.context > 1:
        raise InputError(
            f"parallel.context = {parallel.context} needs attention that Interlace can "
            "replace, and model.source = 'hugging_face' runs the model as it is",
            hint="set parallel.context to 1",
        )


def _check_tensor(model: ModelConfig, tensor: int, sequence_length: int) -> None:
    shares = {
        "model.heads": model.heads,
        "model.ffn_width": model.ffn_width,
        "data.sequence_length": sequence_length,
        "model.vocab_size": model.vocab_size,
    }
    for name, size in shares.items():
        if size % tensor:
            raise InputError(
                f"{name} = {size} cannot be divided among parallel.tensor = {tensor} ranks",
                hint=f"set {name} to a multiple of {tensor}, or parallel.tensor to a divisor",
            )
    if model.kv_heads % tensor and tensor % model.kv_heads:
        raise InputError(
            f"model.kv_heads = {model.kv_heads} heads can neither be divided among nor repeated on "
            f"parallel.tensor = {tensor} ranks",
            hint="set one of them to a multiple of the other",
        )


def _check_context(model: ModelConfig, parallel: ParallelConfig, sequence_length: int) -> None:
    if parallel.context == 1:
        return
    ring = parallel.context_method == "ring"
    pieces = parallel.tensor * parallel.context * (2 if ring else 1)
    if sequence_length % pieces:
        twice = " x 2 (ring)" if ring else ""
        raise InputError(
            f"data.sequence_length = {sequence_length} cannot be divided into "
            f"{pieces} pieces: parallel.context = {parallel.context} x parallel.tensor = "
            f"{parallel.tensor}{twice}",
            hint=f"set data.sequence_length to a multiple of {pieces}",
        )
    heads = model.heads // parallel.tensor
    if not ring and heads % parallel.context:
        raise InputError(
            f"ulysses splits the {heads} query heads of a rank (model.heads = {model.heads} / "
            f"parallel.tensor = {parallel.tensor}) among parallel.context = {parallel.context}",
            hint="set parallel.context to a divisor, or parallel.context_method to ring",
        )
