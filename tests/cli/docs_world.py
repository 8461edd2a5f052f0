"""What the Python blocks of a page leave out: the reader's model, data, tensors and ranks."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from docs_blocks import blocks
from processes import gloo_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import interlace
from interlace.cli.run_file import load_run_config

ON_RANKS = "needs two processes"
"""Why a block is not among those that one process runs."""
FEW = {"train.steps": "1", "train.evaluate_batches": "1", "data.held_out": "0.01"}


def _own_model() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].experts = nn.ParameterList([torch.zeros(2)])  # the page names them, nothing uses them
    model[0].register_buffer("positions", torch.zeros(2))
    batch = (torch.randn(3, 4), torch.randn(3, 1))

    def one_rank(_: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> Any:
        return init_device_mesh("cpu", (1,) * len(shape), mesh_dim_names=mesh_dim_names)

    return {
        "interlace": interlace,
        "module": model,
        "model": model,
        "loss_fn": lambda module, x, y: F.mse_loss(module(x), y),
        "example_inputs": batch,
        "micro_batches": [batch] * 2,
        "data": [[batch] * 2],
        "mesh": None,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "init_device_mesh": one_rank,
        "parallelize_module": lambda *_: None,
        "plan": None,
    }


def _finished_run() -> Path:
    """outputs/run: a run of one step on this rank, recorded and saved."""
    from interlace.train.worker import main

    changes = {"output.directory": "outputs/run", "checkpoint.every": "1", **FEW}
    assert main(load_run_config("quickstart", changes)) == 0
    return Path("outputs/run")


def _checkpoint() -> dict[str, Any]:
    [folder] = (_finished_run() / "checkpoints").glob("step-*")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {"folder": folder, "state": {"weights.model.head.weight": torch.zeros(256, 128)}}


def _report() -> dict[str, Any]:
    from interlace.cli.app import run
    from interlace.ir import store
    from interlace.ir.timeline import Timeline

    folder = _finished_run()
    assert run(["report", str(folder)]) == 0
    assert run(["export", str(folder), "hf-folder"]) == 0
    timeline = store.load(next((folder / "timelines").glob("*.json")), Timeline)
    return {"predicted": timeline, "recorded": timeline}


def _plan() -> dict[str, Any]:
    from interlace.cli.app import run

    words = "plan quickstart --link.rate 1gbit --hardware.peak_tflops 0.1"
    words += " --hardware.memory_gb_per_s 5 -o plan.txt --json plan.json --picture plan.png"
    assert run(words.split()) == 0
    return {}


def _profile() -> dict[str, Any]:
    from interlace.ir import store
    from interlace.train.fake_trace import trace_fake
    from interlace.train.plan_costs import computed_costs

    config = load_run_config("quickstart", {"parallel.tensor": "2"})
    strands = trace_fake(config).whole
    store.save(computed_costs(config, strands.op_graphs)[0], Path("cost.json"))
    return {"graph": strands.pair}


def _resharding() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, 1))
    x = distribute_tensor(torch.rand(4, 4), mesh, [Shard(0), Replicate()])
    assert isinstance(x, DTensor)
    model = nn.ParameterDict({"w": nn.Parameter(x)})
    engine = type("Engine", (), {"load": staticmethod(lambda weights: weights["w"])})
    return {
        "x": x,
        "dst_mesh": mesh,
        "inference_mesh": mesh,
        "model": model,
        "rank": 0,
        "training_ranks": {0},
        "placements_of": lambda _: [Replicate(), Replicate()],
        "steps": 5,
        "train": lambda _: None,
        "prepare_prompts": lambda: None,
        "engine": engine,
    }


def _decompose() -> dict[str, Any]:
    return {
        "x": torch.rand(4, 6),
        "gate": torch.rand(8, 6),
        "up": torch.rand(8, 6),
        "hidden": torch.rand(4, 8),
        "down": torch.rand(6, 8),
        "group": dist.group.WORLD,
    }


def _drills() -> dict[str, Any]:
    """The cluster file that the page shows, in the working folder."""
    [cluster] = blocks("docs/extending.md", "toml")
    Path("own_cluster.toml").write_text(cluster.text)
    return {}


ALONE: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/guides/checkpoints.md": _checkpoint,
    "docs/guides/report.md": _report,
    "docs/guides/plan.md": _plan,
    "docs/guides/profile.md": _profile,
    "docs/extending.md": _drills,
    "docs/guides/lab.md": lambda: {"dist": dist},
}
"""Pages whose blocks, or whose preparation, need no process group."""
WITH_GROUP: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": _own_model,
    "docs/guides/own-model.md": _own_model,
    "docs/guides/resharding.md": _resharding,
    "docs/guides/fsdp2.md": dict,
    "docs/guides/torch-pipelining.md": dict,
    "docs/concepts/decompose.md": _decompose,
}


def run_page(page: str, folder: str) -> int:
    """A child: run the Python blocks of a page one after the other; how many there were."""
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
    todo = [block for block in blocks(page, "python") if not block.not_run]
    with gloo_group() if page in WITH_GROUP else contextlib.nullcontext():
        names = {**ALONE, **WITH_GROUP}.get(page, dict)()
        names["__name__"] = "__main__"
        for block in todo:
            code = "\n" * block.line + block.text  # so that a traceback has the page's lines
            exec(compile(code, str(page), "exec"), names)
    if dist.is_initialized():
        dist.destroy_process_group()
    return len(todo)


def run_on_ranks(page: str, folder: str, changes: dict[str, str]) -> None:
    """A child, one of several: run the Python blocks of a page that need others of its kind, with
    these parts of their text replaced by smaller ones."""
    os.chdir(folder)
    for block in blocks(page, "python"):
        if block.not_run == ON_RANKS:
            text = block.text
            for old, new in changes.items():
                assert old in text
                text = text.replace(old, new)
            exec(compile("\n" * block.line + text, page, "exec"), {"__name__": "__main__"})
