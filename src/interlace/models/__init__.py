"""Plain single-device models, one file each, found by name.

A model file defines `build(config, vocab_size, sequence_length) -> nn.Module`, `TENSOR_PLAN`, the
role of each of its sub-modules under tensor + sequence parallelism (roles:
`interlace.parallel.tensor`), and `CONTEXT_PLAN`, the same under context parallelism: `attention`
(a `CausalAttention`) and `positions` (a module whose buffers are indexed by position along
dimension 0; its parameters stay whole).
A module of a user's own that defines the same is a model file too (`model_file`).
A model maps tokens [batch, sequence] to logits [sequence, batch, vocabulary]: the residual stream
is sequence-first, so that a sequence-parallel gather is one contiguous copy. A mixture of experts
gives the load of its experts too (`moe.RoutedLogits`).

llama.py                Llama
gpt.py                  GPT-2 and GPT-3
moe.py                  mixtures of experts: Mixtral, Qwen3-MoE, Phi-3.5-MoE, like DeepSeek-V3
routers.py              which experts each token goes to, and what balances them
u_transformer.py        a denoising U-Net with attention, for `compile_step`; no model file
experts.py              experts of a mixture-of-experts layer; expert parallelism shares them
attention.py            attention between projected heads; context parallelism replaces it
transformers_model.py   a model of `transformers`, as it is
published_load.py       which experts its tokens choose
hugging_face.py         Hugging Face checkpoints of our models, read and written
hugging_face_config.py  config.json and the ModelConfig that it means
hugging_face_moe.py     the same for mixtures of experts
hugging_face_reader.py  typed values of a config.json
hugging_face_files.py   the tensors of a checkpoint folder
hugging_face_names.py   which tensor each parameter of our models is
hugging_face_export.py  our weights as a checkpoint
"""

import importlib
from typing import Protocol, cast, get_args

from torch import nn

from interlace.errors import InputError, nearest
from interlace.model_config import Architecture, ModelConfig
from interlace.own_code import is_own, load


class ModelFile(Protocol):
    """What a module of this package offers."""

    TENSOR_PLAN: dict[str, str]
    """Role under tensor + sequence parallelism, by pattern of sub-module names."""
    CONTEXT_PLAN: dict[str, str]
    """Role under context parallelism, by pattern of sub-module names."""

    def build(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> nn.Module:
        """The model with freshly initialised weights from torch's global generator."""
        ...


_OFFERS = ("build", "TENSOR_PLAN", "CONTEXT_PLAN")
"""The names that a module must define to be a model file."""


def model_file(architecture: str) -> ModelFile:
    """The model file of that name: one of this package, or a module of a user's own. Raises
    InputError for an unknown one, and for a module that is no model file."""
    known = get_args(Architecture)
    if architecture in known:
        return cast("ModelFile", importlib.import_module(f"{__name__}.{architecture}"))
    if not is_own(architecture):
        raise InputError(
            f"model.architecture = {architecture!r} is not a known model",
            hint=f"{nearest(architecture, known)} A model of your own is a module that Python "
            "finds here.",
        )
    found = load(architecture, "model.architecture")
    missing = [name for name in _OFFERS if not hasattr(found, name)]
    if missing:
        raise InputError(
            f"model.architecture = {architecture!r} has no {' and no '.join(missing)}",
            hint="a model file defines what interlace/models/gpt.py does: " + ", ".join(_OFFERS),
        )
    return cast("ModelFile", found)
