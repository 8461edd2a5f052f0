"""What the Python blocks of pages leave out that need several ranks: models, data, meshes.

Each page is run by two processes, with the names that it takes for granted. Text for four ranks is
changed into text for two, and the change has to be found on the page.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from docs_blocks import blocks
from hugging_face_models import batch, saved
from processes import gloo_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import interlace
from interlace.cli.app import run
from interlace.report.pipeline_picture import pipeline_png

REASONS = ("needs two processes", "needs four processes")
"""Why these blocks are not among those that one process runs."""
Names = dict[str, Any]


@dataclass(frozen=True)
class Page:
    """How the blocks of a page run."""

    names: Callable[[], Iterator[Names]]
    """What each block has to know beside what those before it defined."""
    changes: dict[str, str] = field(default_factory=dict)


def _common() -> Names:
    rows = (torch.randn(12, 16), torch.randn(12, 1))
    return {
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "interlace": interlace,
        "DeviceMesh": DeviceMesh,
        "init_device_mesh": init_device_mesh,
        "parallelize_module": parallelize_module,
        "loss_fn": lambda module, x, y: F.mse_loss(module(x), y),
        "batch": rows,
        "batches": [rows] * 4,
    }


def _layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 32), nn.Tanh(),
        nn.Linear(32, 1),
    )  # fmt: skip


class _Deep(nn.Module):
    """The units that examples/uneven_pipeline.toml names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(32))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def _moe() -> Iterator[Names]:
    yield {}
    folder = Path("mixtral")
    if dist.get_rank() == 0:
        saved("mixtral", folder)
    dist.barrier()
    from transformers import AutoModelForCausalLM

    yield {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "folder": folder,
        "loss_fn": lambda model, ids, labels: model(input_ids=ids, labels=labels).loss,
        "batches": [batch()],
    }


def _pipelines() -> Iterator[Names]:
    tensor = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    rows = _common()["batch"]
    yield {"model": _layers(), "plan": tensor, "loader": [[rows] * 4]}
    yield {"Path": Path, "pipeline_png": pipeline_png}


def _searched() -> Iterator[Names]:
    if dist.get_rank() == 0:
        words = ["schedule", "interleaved(chunks=4)", "--ranks", "2", "--form", "text"]
        with Path("searched.txt").open("w") as file, contextlib.redirect_stdout(file):
            assert run(words) == 0
    dist.barrier()
    yield {"model": _Deep(), "mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))}


def _stage_layouts() -> Iterator[Names]:
    yield {"Model": _layers, "tensor_plan": {"0": ColwiseParallel(), "2": RowwiseParallel()}}


def _images() -> Iterator[Names]:
    from interlace.data.digits import DigitsUnderNoise
    from interlace.models.u_transformer import UTransformer, preset

    images = DigitsUnderNoise(seed=0).micro_batches(step=0, count=2, size=2)

    def loss_fn(model: nn.Module, noisy: Any, level: Any, clean: Any) -> torch.Tensor:
        return (model(noisy, level) - clean).square().mean()

    yield {"model": UTransformer(preset("small")), "batch": images, "loss_fn": loss_fn}


PAGES = {
    "docs/concepts/moe.md": Page(_moe),
    "docs/concepts/pipelines.md": Page(_pipelines, {"(2, 2)": "(2, 1)"}),
    "docs/concepts/searched-schedules.md": Page(_searched),
    "docs/concepts/stage-layouts.md": Page(
        _stage_layouts,
        {"[0, 1]": "[0]", "[2, 3]": "[1]", "get_rank() // 2": "get_rank()", "chunk(2)": "chunk(1)"},
    ),
    "docs/guides/images.md": Page(
        _images, {"(4,)": "(2,)", '"down.1", "down.2", "down.3", "middle", "up.1", "up.2", "up.3"':
                  '"down.2", "middle", "up.2"'},
    ),
}  # fmt: skip


def run_pages(folder: str) -> list[str]:
    """A child, one of two: run the blocks; the pages that had some."""
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
    with gloo_group():
        for name, page in PAGES.items():
            _run(name, page)
    return list(PAGES)


def _run(name: str, page: Page) -> None:
    torch.manual_seed(0)
    changes = dict(page.changes)
    names = {**_common(), "__name__": "__main__"}
    todo = [block for block in blocks(name, "python") if block.not_run in REASONS]
    for block, more in zip(todo, page.names(), strict=True):
        names |= more
        text = block.text
        for old, new in page.changes.items():
            if old in text:
                text = text.replace(old, new)
                changes.pop(old, None)
        exec(compile("\n" * block.line + text, name, "exec"), names)
    assert not changes, f"{name} no longer has {list(changes)}"
