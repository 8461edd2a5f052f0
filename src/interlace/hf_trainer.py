"""The Trainer of `transformers` with interleaved micro-batches: all of an optimizer step at once.

    from interlace.hf_trainer import InterleavedTrainer
    trainer = InterleavedTrainer(model=model, args=args, train_dataset=texts)   # as Trainer
    trainer.train()

Trainer takes the micro-batches of a step (`gradient_accumulation_steps`) from its loader, and calls
`training_step` for one after the other. Here the first of these calls runs them all, in the planned
order, and the others give the losses that are known by then. What a loss is, how it is scaled by
`num_items_in_batch`, and all that follows, clipping, optimizer, logs, checkpoints, is Trainer's own
code. Another trainer than that of `transformers` becomes such a one by
`class Mine(Interleaved, SFTTrainer): pass`.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from interlace.api import compile_step
from interlace.config import OverlapConfig, PlanConfig
from interlace.errors import InputError
from interlace.parallel.meshes import REPLICATE_AXIS
from interlace.runtime.executor import NamedBatch
from interlace.runtime.same_shapes import agree_on_shape
from interlace.step import Step

MOST_SHAPES = 8
"""Steps that are compiled at most, one for each shape of micro-batches."""
_PADDING = (
    'let the collator pad all to one length (padding="max_length"), and set '
    "dataloader_drop_last=True"
)
"""Hint where micro-batches of a step have several shapes, on one rank or over ranks."""
_COUNT = "micro_batches"
_ITEMS = "num_items_in_batch"

BatchShape = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


class Interleaved:
    """What turns a Trainer into one whose micro-batches are interleaved; name it before Trainer.

    The model is the same on all ranks of the job, over which gradients are averaged. Raises
    InputError for settings of Trainer that this does not know, and in the first step for a model
    that cannot be traced.
    """

    strands = 2
    """As in `compile_step`; 1 runs the same graphs one micro-batch after the other."""
    plan: PlanConfig | None = None
    """How the order is found; None for the usual way."""
    overlap: OverlapConfig | None = None
    """Whether collectives are cut into sends; None for no."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _refuse_unknown(self)
        self.steps: dict[tuple[BatchShape, int], Step] = {}
        """Compiled steps, by the shapes of a micro-batch and the number of strands."""
        self._left: list[Tensor] = []
        """Losses of micro-batches that Trainer has not asked for yet."""
        self._batches: list[Any] = []
        """Micro-batches of the optimizer step that has not run yet."""
        self._mesh: DeviceMesh | None = None
        self._traced: nn.Module | None = None
        """The model of `steps`."""

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> Any:
        """The micro-batches of an optimizer step, which are kept for its first `training_step`."""
        found = super().get_batch_samples(  # type: ignore[misc]
            epoch_iterator, num_batches, device
        )
        self._batches, self._left = list(found[0]), []
        return found

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The loss of one micro-batch; its gradient was added up with those of the others."""
        if self._batches:
            batches, self._batches = self._batches, []
            self._left = self._run(model, batches, num_items_in_batch)
        if not self._left:
            raise InputError(
                "training_step was called for a micro-batch that get_batch_samples did not give",
                hint="a trainer with a loop of its own calls compile_step itself "
                "(docs/guides/own-model.md)",
            )
        return self._left.pop(0)

    def _run(
        self, wrapped: nn.Module, batches: list[Any], items: Tensor | int | None
    ) -> list[Tensor]:
        """Run the micro-batches of an optimizer step; gives their losses as Trainer counts them.
        `wrapped` is the model as Accelerate has prepared it."""
        trainer: Any = self
        averaging = isinstance(wrapped, DistributedDataParallel)
        model: nn.Module = wrapped if averaging else trainer.model
        if model is not self._traced:
            # Each train() of a Trainer with a model_init makes a new model, as does each trial.
            self.steps, self._traced = {}, model
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            # Optimizers without a schedule of learning rates hold other weights in evaluation.
            trainer.optimizer.train()
        device = trainer.args.device
        extra = {_COUNT: torch.tensor(float(len(batches)), device=device)}
        if items is not None:
            extra[_ITEMS] = torch.as_tensor(items, device=device)
        prepared = [{**trainer._prepare_inputs(dict(batch)), **extra} for batch in batches]
        agree_on_shape(lambda: f"{len(prepared)} of {_words(_one_shape(prepared))}", hint=_PADDING)
        # An epoch may leave a single micro-batch for its last step.
        step = self._step(_shape_of(prepared[0]), prepared[0], min(self.strands, len(prepared)))
        with _synchronised(model):
            step(prepared)
        return [result for (result,) in step.results]

    def _step(self, shape: BatchShape, example: NamedBatch, strands: int) -> Step:
        if (shape, strands) not in self.steps:
            if self._mesh is None:
                self._mesh = _replicas(example[_COUNT].device)
            known = {each for each, _ in self.steps}
            if shape not in known and len(known) == MOST_SHAPES:
                raise InputError(
                    f"a micro-batch of {_words(shape)} is the {MOST_SHAPES + 1}th shape, and a "
                    "step is compiled for each",
                    hint='let the collator pad to one length (padding="max_length"), or to a '
                    "multiple of a large number (pad_to_multiple_of)",
                )
            self.steps[shape, strands] = self._compiled(example, strands)
        return self.steps[shape, strands]

    def _compiled(self, example: NamedBatch, strands: int) -> Step:
        assert self._traced is not None
        with warnings.catch_warnings():
            # Transformers asks which libraries are installed, by functions that keep the answer.
            warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache")
            return compile_step(
                self._traced,
                self._loss,
                example,
                mesh=self._mesh,
                strands=strands,
                config=self.plan,
                overlap=self.overlap,
            )

    def _loss(self, model: nn.Module, batch: NamedBatch) -> tuple[Tensor, Tensor]:
        """The loss whose mean over micro-batches is differentiated, and the one that is logged."""
        trainer: Any = self
        inputs = dict(batch)
        count, items = inputs.pop(_COUNT), inputs.pop(_ITEMS, None)
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        if _is_scaled(trainer, items):
            return loss * count, loss.detach()
        return loss, (loss / count).detach()


class InterleavedTrainer(Interleaved, Trainer):
    """The Trainer of `transformers`, whose micro-batches are interleaved."""


def _is_scaled(trainer: Any, items: Tensor | None) -> bool:
    """Whether losses of micro-batches add up to that of the step, by the rule of Trainer."""
    told = getattr(trainer, "loss_is_scaled_for_ga", None)
    if told is not None:
        return bool(told)
    by_model = trainer.model_accepts_loss_kwargs and items is not None
    return bool(by_model or trainer.compute_loss_func is not None)


def _refuse_unknown(trainer: Any) -> None:
    """Raise InputError for settings that change what Trainer does beside a backward."""
    args, accelerator = trainer.args, trainer.accelerator
    parallel = getattr(accelerator, "parallelism_config", None)
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    refused = {
        "fp16": accelerator.scaler is not None,
        "torch_compile": bool(args.torch_compile),
        f"n_gpu = {args.n_gpu}": args.n_gpu > 1,
        "a parallelism_config": parallel is not None and parallel.total_size > 1,
        "neftune_noise_alpha": args.neftune_noise_alpha is not None,
        f"optim = {args.optim}": "lomo" in str(args.optim).lower(),
        f"distributed_type = {kind}": kind not in ("NO", "MULTI_GPU", "MULTI_CPU"),
        "accelerate's own gradient accumulation": accelerator.gradient_accumulation_steps != 1,
    }
    found = [name for name, is_set in refused.items() if is_set] + _spread(trainer.model)
    if found:
        raise InputError(
            f"interleaved micro-batches do not go together with {', '.join(found)}",
            hint="leave it out: bf16, replicas under torchrun, PEFT's adapters and gradient "
            "accumulation work; for a model laid out over ranks use compile_step "
            "(docs/guides/own-model.md)",
        )
    if trainer.strands > 1 and args.gradient_accumulation_steps == 1:
        raise InputError(
            "two strands need two micro-batches in a step, and gradient_accumulation_steps is 1",
            hint="set gradient_accumulation_steps to 2 or more, and per_device_train_batch_size to "
            "that much less",
        )


def _spread(model: nn.Module | None) -> list[str]:
    """What a model has that a trace does not follow: weights on several devices, moved by hooks
    of Accelerate, and weights of a quantizer's own types. PEFT's adapters are plain modules."""
    if model is None:
        return []
    found = []
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    hooked = [name for name, each in model.named_modules() if hasattr(each, "_hf_hook")]
    if len(places) > 1 or hooked:
        at = f" over {', '.join(sorted(places))}" if places else f" (hook on {hooked[0] or 'all'})"
        found.append(f"device_map{at}")
    method = getattr(getattr(model, "config", None), "quantization_config", None)
    if method is not None or getattr(model, "is_quantized", False):
        kind = method.get("quant_method") if isinstance(method, dict) else type(method).__name__
        found.append(f"a quantized model ({kind})")
    return found


@contextmanager
def _synchronised(model: nn.Module) -> Iterator[None]:
    """Trainer calls for all micro-batches but the last under `no_sync`, and here all run in the
    first call."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


def _replicas(device: torch.device) -> DeviceMesh | None:
    """The mesh of the ranks of the job, which hold equal models; None for one process."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return None
    ranks = (dist.get_world_size(),)
    return init_device_mesh(device.type, ranks, mesh_dim_names=(REPLICATE_AXIS,))


def _one_shape(batches: list[NamedBatch]) -> BatchShape:
    """The shape of all micro-batches of a step. Raises InputError if they have several."""
    shapes = [_shape_of(each) for each in batches]
    if len(set(shapes)) > 1:
        raise InputError(
            f"the {len(batches)} micro-batches of a step have {len(set(shapes))} shapes: "
            + " and ".join(_words(shape) for shape in dict.fromkeys(shapes)),
            hint=_PADDING,
        )
    return shapes[0]


def _shape_of(batch: NamedBatch) -> BatchShape:
    wrong = [name for name, value in batch.items() if not isinstance(value, Tensor)]
    if wrong:
        raise InputError(
            f"the input {wrong[0]!r} of a micro-batch is a {type(batch[wrong[0]]).__name__}",
            hint="let the collator give tensors only",
        )
    return tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(batch.items()))


def _words(shape: BatchShape) -> str:
    """`input_ids 4 x 128, labels 4 x 128`."""
    return ", ".join(
        f"{name} {' x '.join(map(str, sizes))}"
        for name, sizes, _ in shape
        if name not in (_COUNT, _ITEMS)
    )
