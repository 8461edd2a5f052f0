"""torchtitan's trainer with interleaved micro-batches against itself without.

`make test` has one rank, and on two shards and tensor parallelism; wide are Qwen3, replicas in
float32, and shards of tensor-parallel ranks.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from titan_on_cpu import SITE, allow_every_recipe, mask, prepare, recipe, trainers, world
from torch import Tensor
from torch.distributed.tensor import DTensor

from interlace.config import PlanConfig
from interlace.errors import InputError
from wide import WIDE

pytestmark = pytest.mark.skipif(
    not SITE.exists() and importlib.util.find_spec("torchtitan") is None,
    reason="needs the extra torchtitan, which make setup brings",
)
STEPS = 3
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "sharded": (2, {}),
    "tensor": (2, {"parallelism.tensor_parallel_degree": 2}),
}
"""Number of ranks, and what is set in the debug recipe of a model."""
WIDE_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3": (1, {"model": "qwen3"}),
    "replicas": (
        2,
        {
            "parallelism.data_parallel_replicate_degree": 2,
            "training.mixed_precision_param": "float32",
        },
    ),
    "both": (4, {"parallelism.tensor_parallel_degree": 2}),
}


def trained(kind: Any, config: Any) -> tuple[list[tuple[float, float]], list[Tensor]]:
    """(loss, norm of gradients) of each step as they are logged, and this rank's weights."""
    trainer = kind(config)
    seen: list[tuple[float, float]] = []

    def log(step: int, loss: float, most: float, norm: float, extra_metrics: Any) -> None:
        seen.append((loss, norm))

    trainer.metrics_processor.log = log
    data = trainer.batch_generator(trainer.dataloader)
    for _ in range(STEPS):
        trainer.step += 1
        trainer.train_step(data)
    weights = [parameter.detach() for parameter in trainer.model_parts[0].parameters()]
    trainer.close()
    if getattr(trainer, "compiled", None) is not None:
        assert trainer.compiled.plan.schedule == "two_strand"
    return seen, [each.to_local() if isinstance(each, DTensor) else each for each in weights]


def equal(folder: str, options: dict[str, Any]) -> bool:
    """Whether losses, norms and weights have the same bits."""
    from interlace.torchtitan import interleaved

    stock, ours = trainers(PlanConfig(cluster="h100"))
    wanted = trained(stock, interleaved(recipe(folder, **options)))
    found = trained(ours, interleaved(recipe(folder, **options)))
    assert len(found[0]) == STEPS
    assert len({loss for loss, _ in found[0]}) == STEPS
    pairs = zip(found[1], wanted[1], strict=True)
    return found[0] == wanted[0] and all(torch.equal(a, b) for a, b in pairs)


def refused(folder: str) -> dict[str, str]:
    """What a recipe is refused with, by what is set in it."""
    from interlace.torchtitan import TitanTrainer, interleaved

    settings: dict[str, tuple[str, Any]] = {
        "pipeline": ("parallelism.pipeline_parallel_degree", 2),
        "context": ("parallelism.context_parallel_degree", 2),
        "experts": ("parallelism.expert_parallel_degree", 2),
        "backend": ("parallelism.spmd_backend", "spmd_types"),
        "compile": ("compile.enable", True),
        "graphs": ("training.disable_cuda_graphs", False),
        "offload": ("training.enable_cpu_offload", True),
        "one": ("training.global_batch_size", -1),
    }
    found = {}
    for name, (path, value) in settings.items():
        config = interleaved(recipe(folder))
        part, _, field = path.partition(".")
        setattr(getattr(config, part), field, value)
        found[name] = _error(lambda config=config: config.build())
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
    from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel
    from torchtitan.models.llama3.config_registry import llama3_debugmodel_dist_gemm

    plain = recipe(folder)
    found["stock"] = _error(lambda: TitanTrainer(plain))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch.distributed, "set_timeout", raising=False)
        found["loop"] = _error(lambda: TitanTrainer.train(object.__new__(TitanTrainer)))
    found["mixture"] = _error(lambda: interleaved(deepseek_v3_debugmodel()).build())
    tied = interleaved(recipe(folder, "qwen3"))
    tied.parallelism.tensor_parallel_degree = 2
    found["tied"] = _error(tied.build)
    found["matmuls"] = _error(lambda: interleaved(llama3_debugmodel_dist_gemm()).build())
    from interlace import torchtitan as ours

    found["machine"] = _error(getattr(ours, "test_torchtitan.wants_more"))
    found["package"] = _error(lambda: getattr(ours, "of_nobody.recipes.mine"))
    found["windows"] = _error(lambda: interleaved(gpt_oss_debugmodel()).build())
    return found


REFUSED = {
    "pipeline": "pipeline_parallel_degree = 2",
    "context": "context_parallel_degree = 2",
    "experts": "expert_parallel_degree = 2",
    "backend": "spmd_backend = 'spmd_types'",
    "compile": "compile.enable = True",
    "graphs": "disable_cuda_graphs = False",
    "offload": "enable_cpu_offload = True",
    "one": "--training.global_batch_size",
    "stock": "spmd_backend",
    "loop": "torch.distributed.set_timeout behind its first step",
    "mixture": "has experts",
    "tied": "ties its embedding to its head",
    "matmuls": "communicates inside of its matmuls",
    "windows": "has experts",
    "machine": "cannot be made here: MXFP8 is only supported on SM100",
    "package": "needs of_nobody, which cannot be imported",
}


def of_every_recipe() -> dict[str, str]:
    """What each recipe in torchtitan's wheel is refused with; empty if it is taken."""
    import torchtitan

    from interlace import torchtitan as ours

    allow_every_recipe()
    folder = Path(torchtitan.__path__[0])
    found = {}
    for file in sorted(folder.glob("models/*/config_registry.py")):
        for name in re.findall(r"^def ([a-z]\w*)\(\) -> ", file.read_text(), re.MULTILINE):
            assert name not in found
            found[name] = _error(lambda name=name: ours.refuse_unknown(getattr(ours, name)()))
    return found


TAKEN = (
    "llama3_debugmodel", "llama3_debugmodel_varlen_attn", "llama3_debugmodel_ce_loss", "llama3_8b",
    "llama3_70b", "sft_debugmodel", "qwen3_debugmodel", "qwen3_debugmodel_flex_flash",
    "qwen3_debugmodel_non_fused_qkv", "qwen3_0_6b", "qwen3_1_7b", "qwen3_14b", "qwen3_32b",
    "sft_qwen3_8b_math",
)  # fmt: skip
"""Of the recipes in torchtitan's wheel."""
REASONS = (
    "has experts", "expert_parallel_degree", "pipeline_parallel_degree", "quantized layers",
    "communicates inside of its matmuls", "attention masks of its own", "not one of torchtitan's",
)  # fmt: skip
"""Why the others are refused: one of these each."""


def check_recipes(found: dict[str, str]) -> None:
    """Every recipe is taken, or refused with a reason that this module knows."""
    assert len(found) > 60
    assert {name for name, error in found.items() if not error} == set(TAKEN)
    for name, error in found.items():
        assert name in TAKEN or any(reason in error.splitlines()[0] for reason in REASONS), error
    text = (Path(__file__).parents[2] / "docs/guides/torchtitan.md").read_text(encoding="utf-8")
    for name in TAKEN:
        assert f"`{name}`" in text, name


def wants_more() -> Any:
    """A recipe that torchtitan cannot make on this machine."""
    raise ValueError("MXFP8 is only supported on SM100 or later")


def _error(call: Any) -> str:
    try:
        call()
    except InputError as error:
        return f"{error}\n{error.hint}"
    return ""


def command_line() -> str:
    """What `--module interlace.torchtitan --config llama3_debugmodel` builds."""
    from torchtitan.config import ConfigManager

    from interlace.torchtitan import PackedAttention, TitanTrainer

    arguments = ["--module", "interlace.torchtitan", "--training.global_batch_size", "16"]
    kinds = []
    for name in ("llama3_8b", "torchtitan.models.llama3.config_registry.llama3_debugmodel"):
        config: Any = ConfigManager().parse_args([*arguments, "--config", name])
        assert isinstance(config, TitanTrainer.Config)
        assert config.training.global_batch_size == 16
        layer = config.model_spec.model.layers[0]
        assert isinstance(layer.attention.inner_attention, PackedAttention.Config)
        kinds.append(type(config)._owner)
    assert set(kinds) == {TitanTrainer}
    with pytest.raises(ValueError, match="not found"):
        ConfigManager().parse_args([*arguments, "--config", "llama3_9b"])
    return kinds[0].__name__


def attention_is_flex() -> float:
    """How far `PackedAttention` is from FlexAttention with torchtitan's mask, forward."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
    from torchtitan.models.common import attention

    from interlace.torchtitan import PackedAttention, packed_mask

    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])
    assert torch.equal(packed_mask(positions), mask(positions))
    q, k, v = torch.randn(3, 2, 8, 4, 16).unbind()
    document = attention.get_efficient_causal_mask_mod_for_packed_document(positions)
    both = and_masks(attention.get_causal_mask_mod(), document)
    block = create_block_mask(both, 2, None, 8, 8, device="cpu")
    wanted = flex_attention(*(each.transpose(1, 2) for each in (q, k, v)), block_mask=block)
    found = PackedAttention.Config().build()(q, k, v, attention_masks=packed_mask(positions))
    return float((found - wanted.transpose(1, 2)).abs().max())


def ranks(folder: str, options: list[dict[str, Any]]) -> list[bool]:
    """A child: whether each case is equal."""
    prepare()
    with world():
        return [equal(folder, each) for each in options]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["plain"], id="1"),
        pytest.param(["sharded", "tensor"], id="2"),
        *(pytest.param([name], marks=WIDE, id=name) for name in WIDE_CASES),
    ],
)
def test_losses_norms_and_weights_are_those_of_torchtitan(names: list[str], tmp_path: Path) -> None:
    """To the last bit, in bfloat16 and float32, with gradients accumulated over 3 micro-batches."""
    cases = [(CASES | WIDE_CASES)[name] for name in names]
    [number] = {number for number, _ in cases}
    args = [str(tmp_path), [options for _, options in cases]]
    for result in run_ranks("test_torchtitan:ranks", number, args=args, timeout_s=200):
        assert dict(zip(names, result.value, strict=True)) == dict.fromkeys(names, True)


def without_training(folder: str) -> dict[str, Any]:
    """A child: what is refused, what the command line builds, and masks."""
    prepare()
    with world():
        found = {"refused": refused(folder), "built": command_line(), "flex": attention_is_flex()}
        return found | {"recipes": of_every_recipe()}


def test_recipes_are_taken_or_refused(tmp_path: Path) -> None:
    """By name and with a reason; and packed documents have the mask of FlexAttention."""
    args = [str(tmp_path)]
    [result] = run_ranks("test_torchtitan:without_training", 1, args=args, timeout_s=200)
    value = result.value
    assert value["built"] == "TitanTrainer"
    assert value["flex"] < 1e-6
    assert value["refused"].keys() == REFUSED.keys()
    for name, part in REFUSED.items():
        assert part in value["refused"][name], (name, value["refused"][name])
    check_recipes(value["recipes"])
