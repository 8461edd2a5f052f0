"""`interlace plan` builds a few blocks of a deep model and copies the others: nobody sees that."""

from dataclasses import replace

import pytest
from torch import nn
from torch.distributed.tensor import DTensor

from interlace.cli.run_file import load_run_config
from interlace.runtime.memory_limit import constant_bytes
from interlace.runtime.traced_strands import Strands
from interlace.train import fake_trace
from interlace.train.fake_depth import with_few_layers

DEEP = {"model.layers": "7"}
EXPERTS = {
    "model.layers": "9",
    "model.experts.dense_layers": "2",
    "model.experts.count": "4",
}


@pytest.fixture(autouse=True)
def outside_any_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def form(module: nn.Module) -> dict[str, object]:
    """All that is said of the tensors of a module, by name; and which of them are one."""
    tensors = [*module.named_parameters(remove_duplicate=False)]
    tensors += module.named_buffers(remove_duplicate=False)
    first: dict[int, str] = {}
    return {
        name: (
            tuple(t.shape), t.stride(), t.dtype, t.requires_grad, type(t),
            (t.placements, t.device_mesh, t.to_local().shape) if isinstance(t, DTensor) else None,
            first.setdefault(id(t), name),
        )
        for name, t in tensors
    }  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        (
            "quickstart",
            {"parallel.tensor": "2", "parallel.data_shard": "2", "train.dtype": "bfloat16"},
        ),
        ("quickstart", {"model.architecture": "gpt", "parallel.tensor": "2"}),
        (
            "quickstart",
            {"parallel.context": "2", "model.tied_head": "true", "train.recompute": "layer"},
        ),
        ("moe-quickstart", {**EXPERTS, "parallel.expert": "2", "parallel.tensor": "2"}),
    ],
)
def test_a_copy_is_as_what_is_built(preset, overrides, monkeypatch):
    config = load_run_config(preset, DEEP | overrides)
    assert with_few_layers(config).model.layers < 7
    found: list[Strands] = []
    for build in (with_few_layers, lambda given: given):
        monkeypatch.setattr(fake_trace, "with_few_layers", build)
        found.append(fake_trace.trace_fake(config).whole)
    copied, built = found
    assert form(copied.module) == form(built.module)
    assert copied.digest == built.digest
    assert copied.placements == built.placements
    assert not copied.not_repeated
    held = [
        constant_bytes(config.parallel, config.train.dtype, each.module, each.data)
        for each in found
    ]
    assert held[0] == held[1]


def test_only_models_of_ours_are_copied():
    config = load_run_config("quickstart", DEEP)
    assert with_few_layers(config).model.layers == 1
    own = replace(config, model=replace(config.model, architecture="my_models:file"))
    assert with_few_layers(own) is own
    shallow = replace(config, model=replace(config.model, layers=1))
    assert with_few_layers(shallow).model.layers == 1
