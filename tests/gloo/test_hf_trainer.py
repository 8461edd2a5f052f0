"""The Trainer of `transformers` with interleaved micro-batches against itself without.

Wide is a last step of one micro-batch of two, beside one of two of three."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from processes import run_ranks
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from interlace.config import PlanConfig
from interlace.errors import InputError, PeerError
from interlace.hf_trainer import MOST_SHAPES, InterleavedTrainer
from wide import WIDE

BOUND = 2e-6
"""Largest difference of a loss or a weight in float32, after three steps of SGD. Stock Trainer
leaves out a mask of which all is seen, and a graph does not."""

BF16_BOUND = 1e-3
"""The same under autocast to bfloat16, a quarter of whose rounding (2**-8) this is."""


class Ours(InterleavedTrainer):
    """Times are computed: measuring takes longer than all else."""

    plan = PlanConfig(cluster="h100")


def llama() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    )


def bert() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(**sizes, **off, num_attention_heads=4, vocab_size=64, num_labels=3)
    )


def texts(count: int) -> list[dict[str, Tensor]]:
    """Sequences of 12 tokens, whose first ones, of another number each, have no label."""
    draw = torch.Generator().manual_seed(2)
    found = []
    for number in range(count):
        tokens = torch.randint(0, 64, (12,), generator=draw)
        labels = tokens.clone()
        labels[: number % 7] = -100
        found.append(
            {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
        )
    return found


def classes(count: int) -> list[dict[str, Tensor]]:
    """The same sequences, each of a class."""
    kept = ("input_ids", "attention_mask")
    return [
        {name: each[name] for name in kept} | {"labels": torch.tensor(number % 3)}
        for number, each in enumerate(texts(count))
    ]


def trained(
    kind: type[Trainer], folder: Path, model: nn.Module, data: list[Any], **options: Any
) -> tuple[list[float], dict[str, Tensor], Trainer]:
    """Logged losses and weights after training."""
    given = {"gradient_accumulation_steps": 3, "max_steps": 3, "learning_rate": 0.05} | options
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, logging_steps=1, use_cpu=True,
        save_strategy="no", report_to="none", optim="sgd", lr_scheduler_type="constant",
        disable_tqdm=True, dataloader_drop_last=True, **given,
    )  # fmt: skip
    trainer = kind(model=model, args=args, train_dataset=data, eval_dataset=data[:2])
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return losses, weights, trainer


def difference(make: Any, data: list[Any], folder: Path, **options: Any) -> tuple[float, float]:
    """The largest of losses, and of weights, between Trainer and ours."""
    plain, wanted, _ = trained(Trainer, folder, make(), data, **options)
    losses, weights, trainer = trained(Ours, folder, make(), data, **options)
    assert len(losses) == len(plain) > 0
    assert "two_strand" in {step.plan.schedule for step in trainer.steps.values()}
    assert losses != losses[:1] * len(losses)
    return (
        max(abs(a - b) for a, b in zip(losses, plain, strict=True)),
        max(float((weights[name] - wanted[name]).abs().max()) for name in wanted),
    )


@pytest.mark.parametrize(
    ("make", "data", "options"),
    [
        (llama, texts, {}),
        (llama, texts, {"label_smoothing_factor": 0.1}),
        (llama, texts, {"max_steps": -1, "num_train_epochs": 1}),  # the last step has two of three
        pytest.param(
            llama,
            texts,
            {"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 1},
            marks=WIDE,
        ),
        (bert, classes, {"eval_strategy": "steps", "eval_steps": 1}),
        (llama, texts, {"bf16": True}),
    ],
    ids=["llama", "label smoothing", "two of three", "one of two", "bert", "bf16"],
)
def test_losses_and_weights_are_those_of_trainer(
    make: Any, data: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """Micro-batches with unequal numbers of labels count as Trainer counts them."""
    bound = BF16_BOUND if options.get("bf16") else BOUND
    loss, weight = difference(make, data(22), tmp_path, **options)
    assert loss < bound
    assert weight < bound


def replicas(folder: str) -> tuple[float, float, str]:
    """A child: the same on ranks that see different data, and what is said of texts that are longer
    on one of them."""
    loss, weight = difference(llama, texts(24), Path(folder), average_tokens_across_devices=True)
    sizes = [4, 4, 5, 5] * 4  # rank 1 has the second batch of two
    data = [dict.fromkeys(("input_ids", "labels"), torch.ones(size).long()) for size in sizes]
    with pytest.raises(PeerError) as found:
        trained(InOrder, Path(folder), llama(), data, gradient_accumulation_steps=2)
    return loss, weight, found.value.message


def test_replicas_average_as_ddp_does(tmp_path: Path) -> None:
    found = run_ranks("test_hf_trainer:replicas", 2, args=[str(tmp_path)], timeout_s=120)
    for loss, weight, told in (result.value for result in found):
        assert loss < BOUND
        assert weight < BOUND
        assert "rank 0: 2 of input_ids 2 x 4" in told
        assert "rank 1: 2 of input_ids 2 x 5" in told


class Averaging(torch.optim.SGD):
    """Has two sets of weights, as optimizers without a schedule have; steps in training only."""

    training = False

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    def step(self, closure: Any = None) -> Any:
        assert self.training
        return super().step(closure)


def test_a_new_model_has_steps_of_its_own(tmp_path: Path) -> None:
    """Each train() of a Trainer with a model_init trains a new model, here after evaluations."""
    data, found = texts(22), []
    for kind in (Trainer, Ours):
        args = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=2, logging_steps=1,
            use_cpu=True, gradient_accumulation_steps=2, save_strategy="no", report_to="none",
            eval_strategy="steps", eval_steps=1, disable_tqdm=True, learning_rate=0.05,
        )  # fmt: skip
        trainer = kind(
            model_init=llama, args=args, train_dataset=data, eval_dataset=data[:2],
            optimizer_cls_and_kwargs=(Averaging, {"lr": 0.05}),
        )  # fmt: skip
        for _ in range(2):
            trainer.train()
            found.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    first, second, *ours = found
    for wanted, weights in zip((first, second), ours, strict=True):
        for name, weight in wanted.items():
            assert float((weights[name] - weight).abs().max()) < BOUND


def longer(count: int) -> list[dict[str, Tensor]]:
    """Micro-batches of more shapes than steps are compiled for."""
    sizes = (size for number in itertools.count(4) for size in [number] * 2)
    return [
        {"input_ids": torch.ones(size, dtype=torch.int64), "labels": torch.ones(size).long()}
        for size, _ in zip(sizes, range(count), strict=False)
    ]


class InOrder(Ours):
    """Samples come in the order of the data."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return None


def test_what_is_refused(tmp_path: Path) -> None:
    model = llama()

    def refusal(kind: type[Trainer], data: list[Any], **options: Any) -> str:
        with pytest.raises(InputError) as found:
            trained(kind, tmp_path, model, data, **options)
        return f"{found.value.message} hint: {found.value.hint}"

    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    assert "with device_map over cpu, disk hint: leave" in refusal(Ours, texts(8))
    del model.hf_device_map
    model.config.quantization_config = {"quant_method": "gptq"}
    assert "with a quantized model (gptq) hint: leave" in refusal(Ours, texts(8))
    del model.config.quantization_config
    add_hook_to_module(model.lm_head, ModelHook())
    assert "with device_map (hook on lm_head) hint: leave" in refusal(Ours, texts(8))
    model = llama()
    text = refusal(Ours, texts(8), torch_compile=True)
    assert "do not go together with torch_compile" in text
    assert "with neftune_noise_alpha" in refusal(Ours, texts(8), neftune_noise_alpha=5.0)
    text = refusal(InOrder, longer(12), gradient_accumulation_steps=2)
    assert "the 2 micro-batches of a step have 2 shapes" in text
    assert "input_ids 2 x 4" in text
    assert "padding=" in text
    count = 2 * MOST_SHAPES + 2
    assert "accumulation_steps is 1 hint: set" in refusal(
        Ours, texts(8), gradient_accumulation_steps=1
    )
    once = {"gradient_accumulation_steps": 1, "max_steps": MOST_SHAPES + 1}
    alone = type("Alone", (InOrder,), {"strands": 1})
    assert f"is the {MOST_SHAPES + 1}th shape" in refusal(alone, longer(count), **once)
