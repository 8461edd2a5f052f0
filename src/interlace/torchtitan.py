"""Recipes of torchtitan with interleaved micro-batches: all of an optimizer step at once.

    torchrun --nproc_per_node 8 -m torchtitan.train --module interlace.torchtitan \
        --config llama3_8b --training.local_batch_size 1 --training.global_batch_size 32

torchtitan asks this module for a function of the name given by `--config`. It finds the recipe of
that name in torchtitan (or `package.module.function`, your own), changes what a traced step does
not know (`interleaved`), and torchtitan builds a `TitanTrainer`. Trainer draws the
micro-batches of a step (its gradient accumulation) and calls `forward_backward_step` for one after
the other. Here the first of these calls runs them all, in the planned order, and the others give
the losses that are known by then. Clipping, optimizer, logs, checkpoints and validation are
Trainer's own code. Another trainer becomes such a one by `class Mine(InterleavedSteps, MyTrainer)`.
"""

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torchtitan import models
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.models import _supported_models
from torchtitan.models.common import dist_gemm
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from interlace.api import compile_step
from interlace.config import OverlapConfig, PlanConfig
from interlace.errors import InputError
from interlace.runtime.executor import NamedBatch
from interlace.step import Step

_COUNT = "micro_batches"
_TOKENS = "global_valid_tokens"
_BACKEND = "partial_dtensor"
"""The one of torchtitan's layouts whose weights are DTensors, and plain without tensor parallel."""


class PackedAttention(FlexAttention):
    """Attention within the documents of a packed sequence, by a mask that a graph can hold.

    Given a boolean tensor as mask it is `scaled_dot_product_attention`; given what torchtitan makes
    for FlexAttention, as in validation, it is FlexAttention.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """That of FlexAttention."""

    def forward(  # type: ignore[override]
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Tensor:
        """What each token sees, [batch, length, heads, size of a head], as its inputs are."""
        if not isinstance(attention_masks, Tensor):
            return super().forward(
                q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, scale=scale,
                enable_gqa=enable_gqa, **others,
            )  # fmt: skip
        seen = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH)),
            attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        return seen.transpose(1, 2)


def packed_mask(positions: Tensor) -> Tensor:
    """Whether a token sees another, [batch, 1, length, length]: one before it, or itself, in its
    document. `positions` [batch, length] begin with 0 in each document."""
    document = torch.cumsum(positions == 0, dim=1)
    length = positions.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & before)[:, None]


class InterleavedSteps:
    """What turns torchtitan's Trainer into one whose micro-batches are interleaved; name it first.

    Raises InputError for settings that a traced step does not know, before ranks connect, and in
    the first step for a model that cannot be traced.
    """

    strands = 2
    """As in `compile_step`; 1 runs the same graphs one micro-batch after the other."""
    plan: PlanConfig | None = None
    """How the order is found; None for the usual way."""
    overlap: OverlapConfig | None = None
    """Whether collectives are cut into sends; None for no."""

    def __init__(self, config: Trainer.Config) -> None:
        refuse_unknown(config)
        super().__init__(config)  # type: ignore[call-arg]
        trainer: Any = self
        if self.strands > 1 and trainer.gradient_accumulation_steps == 1:
            raise InputError(
                "two strands need two micro-batches in a step, and torchtitan draws one: "
                f"{config.training.local_batch_size} sequences on each data-parallel rank",
                hint="set --training.global_batch_size to a multiple of --training.local_batch_size"
                " times the data-parallel ranks, two times or more",
            )
        self.compiled: Step | None = None
        """The step; None before the first."""
        self._batches: list[tuple[NamedBatch, Tensor]] = []
        """Micro-batches of the optimizer step that has not run yet."""
        self._left: list[Tensor] = []
        """Losses of micro-batches that Trainer has not asked for yet."""

    def train(self) -> None:
        """Trainer's loop, which fails behind its first step on a torch that lacks what it calls."""
        if not hasattr(dist, "set_timeout"):
            raise InputError(
                "torchtitan's loop calls torch.distributed.set_timeout behind its first step, and "
                f"torch {torch.__version__} has none",
                hint="install torch 2.14 or newer, with or without Interlace",
            )
        super().train()  # type: ignore[misc]

    def train_step(self, data_iterator: Iterator[tuple[NamedBatch, Tensor]]) -> None:
        """An optimizer step; its micro-batches are kept for the first `forward_backward_step`."""
        self._batches, self._left = [], []

        def kept() -> Iterator[tuple[NamedBatch, Tensor]]:
            for inputs, labels in data_iterator:
                self._batches.append((dict(inputs), labels))
                yield inputs, labels

        super().train_step(kept())  # type: ignore[misc]

    def forward_backward_step(
        self, *, input_dict: Any, labels: Any, global_valid_tokens: Tensor
    ) -> Tensor:
        """The loss of one micro-batch; its gradient was added up with those of the others."""
        del input_dict, labels
        if self._batches:
            batches, self._batches = self._batches, []
            self._left = self._run(batches, global_valid_tokens)
        if not self._left:
            raise InputError(
                "forward_backward_step was called for a micro-batch that train_step did not draw",
                hint="a trainer with a loop of its own calls compile_step itself "
                "(docs/guides/own-model.md)",
            )
        return self._left.pop(0)

    def _run(self, drawn: list[tuple[NamedBatch, Tensor]], tokens: Tensor) -> list[Tensor]:
        """Run the micro-batches of an optimizer step; gives their losses as Trainer counts them."""
        trainer: Any = self
        batches = [self._prepared(inputs, labels, len(drawn), tokens) for inputs, labels in drawn]
        with trainer.train_context():
            if self.compiled is None:
                self.compiled = compile_step(
                    trainer.model_parts[0], self._loss, batches[0], mesh=self._mesh(),
                    strands=self.strands, config=self.plan, overlap=self.overlap,
                )  # fmt: skip
            self.compiled(batches)
        return [loss for (loss,) in self.compiled.results]

    def _prepared(
        self, inputs: NamedBatch, labels: Tensor, count: int, tokens: Tensor
    ) -> NamedBatch:
        """A micro-batch on its device, as `_loss` takes it."""
        trainer: Any = self
        moved = {name: value.to(trainer.device) for name, value in inputs.items()}
        if moved.keys() != {"input", "positions"}:
            raise InputError(
                f"a micro-batch holds {', '.join(sorted(moved))}, not input and positions",
                hint="take a recipe of text, without images, whose loader gives positions",
            )
        positions = moved.pop("positions")
        # Without positions Trainer makes no mask of its own: `_loss` makes one in the graph.
        found, labels, _ = trainer.post_dataloading_process(moved, labels.to(trainer.device))
        return {
            "input": found, "labels": labels, "positions": positions, _TOKENS: tokens,
            _COUNT: torch.tensor(float(count), device=trainer.device),
        }  # fmt: skip

    def _loss(self, model: nn.Module, batch: NamedBatch) -> tuple[Tensor, Tensor]:
        """The loss whose mean over micro-batches is differentiated, and the one that is logged."""
        trainer: Any = self
        positions = batch["positions"]
        pred = model(batch["input"], positions=positions, attention_masks=packed_mask(positions))
        loss, _ = trainer.loss_fn(pred, batch["labels"], batch[_TOKENS], positions=positions)
        return loss * batch[_COUNT], loss.detach()

    def _mesh(self) -> Any:
        """The axes over which the model is laid out."""
        dims = cast("Any", self).parallel_dims
        names = {"dp_replicate": dims.dp_replicate_enabled, "fsdp": True, "tp": dims.tp_enabled}
        return dims.get_mesh([name for name, is_used in names.items() if is_used])


class TitanTrainer(InterleavedSteps, Trainer):
    """torchtitan's Trainer, whose micro-batches are interleaved."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """That of Trainer."""


def interleaved(recipe: Trainer.Config) -> TitanTrainer.Config:
    """`recipe` for `TitanTrainer`, with what a traced step needs, which is logged:

    attention by `PackedAttention`, the loss on all logits at once, the layout `partial_dtensor`, no
    activation checkpoints, no torch.compile, no CUDA graphs. What the command line sets comes
    later, and is refused if it is unknown. Changes `recipe`. Raises InputError for a recipe of a
    trainer of its own."""
    if type(recipe) is not Trainer.Config:
        raise InputError(
            f"the recipe is a {type(recipe).__qualname__}, not one of torchtitan's Trainer",
            hint="derive a trainer of it: class Mine(InterleavedSteps, ThatTrainer)",
        )
    assert recipe.model_spec is not None
    changed = []
    for kind in (FlexAttention.Config, VarlenAttention.Config):
        for _, found, parent, place in list(recipe.model_spec.model.traverse(kind)):
            if not isinstance(found, PackedAttention.Config):
                shared = {each.name for each in fields(PackedAttention.Config)}
                kept = {f.name: getattr(found, f.name) for f in fields(found) if f.name in shared}
                _put(parent, place, PackedAttention.Config(**kept))
                changed.append(f"{kind.__qualname__} -> PackedAttention.Config")
    if isinstance(recipe.loss, ChunkedLossWrapper.Config):
        recipe.loss = recipe.loss.loss_fn
        changed.append("loss: not in chunks")
    if recipe.activation_checkpoint is not None:
        recipe.activation_checkpoint = None
        changed.append("activation_checkpoint: none")
    if recipe.compile.enable:
        recipe.compile.enable = False
        changed.append("compile.enable: False")
    if recipe.parallelism.spmd_backend != _BACKEND:
        recipe.parallelism.spmd_backend = _BACKEND
        changed.append(f"parallelism.spmd_backend: {_BACKEND}")
    if not recipe.training.disable_cuda_graphs:
        recipe.training.disable_cuda_graphs = True
        changed.append("training.disable_cuda_graphs: True")
    logger.info("Interlace changed the recipe: %s", "; ".join(dict.fromkeys(changed)) or "nothing")
    values = {each.name: getattr(recipe, each.name) for each in fields(recipe)}
    return TitanTrainer.Config(**values)


def _put(parent: Any, place: Any, value: Any) -> None:
    if isinstance(parent, list):
        parent[place] = value
    else:
        setattr(parent, place, value)


def refuse_unknown(config: Trainer.Config) -> None:
    """Raise InputError for settings that change what Trainer does beside a backward, or parts of a
    model that the step does not have; nothing is built for that."""
    parallel, model = config.parallelism, config.model_spec and config.model_spec.model
    refused = {
        "pipeline_parallel_degree": (parallel.pipeline_parallel_degree, 1),
        "context_parallel_degree": (parallel.context_parallel_degree, 1),
        "expert_parallel_degree": (parallel.expert_parallel_degree, 1),
        "spmd_backend": (parallel.spmd_backend, _BACKEND),
        "enable_fsdp_symm_mem": (parallel.enable_fsdp_symm_mem, False),
        "enable_cpu_offload": (config.training.enable_cpu_offload, False),
        "disable_cuda_graphs": (config.training.disable_cuda_graphs, True),
        "compile.enable": (config.compile.enable, False),
        "comm.mode": (config.comm.mode, "default"),
        "spmd_typechecking": (config.debug.spmd_typechecking, False),
    }
    for name, (found, known) in refused.items():
        if found != known:
            raise InputError(
                f"interleaved micro-batches do not go together with {name} = {found!r}",
                hint=f"set {name} to {known!r}",
            )
    if config.activation_checkpoint is not None:
        raise InputError(
            "interleaved micro-batches do not go together with activation_checkpoint: "
            + type(config.activation_checkpoint).__qualname__,
            hint="set it to none, and choose a smaller training.local_batch_size",
        )
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        raise InputError(
            "ChunkedLossWrapper runs backwards inside of a forward, which is not traced",
            hint="set loss to the loss_fn in it",
        )
    if not isinstance(model, Decoder.Config):
        raise InputError(
            f"the model is a {type(model).__qualname__}, not a Decoder of torchtitan",
            hint="call compile_step in a loop of your own (docs/guides/own-model.md)",
        )
    if model.enable_weight_tying and parallel.tensor_parallel_degree > 1:
        raise InputError(
            "the model ties its embedding to its head, and under tensor parallelism torchtitan "
            "ties them behind FSDP2's back",
            hint="set tensor_parallel_degree to 1, or enable_weight_tying to False",
        )
    _refuse_model(model)


def _refuse_model(model: Any) -> None:
    """Raise InputError for parts of a model that the step does not have."""
    if has_quantization(model):
        raise InputError(
            "the model has quantized layers (float8, MXFP8 or NVFP4)",
            hint="take a recipe without converters",
        )
    if any(getattr(layer, "moe", None) is not None for layer in model.layers):
        raise InputError(
            "the model has experts, and torchtitan's are not traced",
            hint="take a dense model; interlace train has experts of its own",
        )
    for name, found, _, _ in model.traverse(Module.Config, recurse=True):
        if found._owner.__module__ == dist_gemm.__name__:
            raise InputError(
                f"{name} is {type(found).__qualname__}, which communicates inside of its matmuls",
                hint='leave tp_gemm_backend="dist_gemm" out of model_registry',
            )
    if model._owner.get_attention_masks is not Decoder.get_attention_masks:
        raise InputError(
            f"{model._owner.__qualname__} has attention masks of its own",
            hint="take a model whose tokens see all of their document before them",
        )
    for kind in (FlexAttention.Config, VarlenAttention.Config):
        for name, found, _, _ in model.traverse(kind):
            if not isinstance(found, PackedAttention.Config):
                raise InputError(
                    f"{name} is {type(found).__qualname__}, whose kernel is not traced",
                    hint="make it PackedAttention.Config(): interleaved(recipe) does that",
                )


def __getattr__(name: str) -> Callable[[], TitanTrainer.Config]:
    """The recipe of this name of torchtitan, or `package.module.function`, interleaved."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, function = name.rpartition(".")
    for each in [module] if module else _modules_of(name):
        with _told_as_ours(name):
            found = getattr(importlib.import_module(each), function, None)
        if callable(found):
            return partial(_of_function, name, found)
    raise AttributeError(
        f"torchtitan has no recipe {name!r}: give the name of one of its models' config_registry, "
        "or package.module.function"
    )


def _of_function(name: str, function: Callable[[], Any]) -> TitanTrainer.Config:
    with _told_as_ours(name):
        recipe = function()
    return interleaved(recipe)


@contextmanager
def _told_as_ours(name: str) -> Iterator[None]:
    """What torchtitan says of a recipe that it cannot make here, as it would without Interlace."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(
            f"recipe {name!r} needs {error.name or error}, which cannot be imported",
            hint="install the package that has it: without interlace.torchtitan too",
        ) from error
    except ValueError as error:
        raise InputError(
            f"recipe {name!r} cannot be made here: {error}",
            hint="that is torchtitan's word, which it gives without interlace.torchtitan too",
        ) from error


def _modules_of(name: str) -> list[str]:
    """Modules of torchtitan that define a recipe of this name. Their files are read and not
    imported, as some of them need packages that the others do without; no word of the name says
    where it is (`moonlight_16b_a3b` is in kimi_k2_7)."""
    defined = re.compile(rf"^def {re.escape(name)}\(", re.MULTILINE)
    found = []
    for model in sorted(_supported_models):
        file = Path(models.__path__[0], model, "config_registry.py")
        if file.is_file() and defined.search(file.read_text(encoding="utf-8")):
            found.append(f"{models.__name__}.{model}.config_registry")
    return found
