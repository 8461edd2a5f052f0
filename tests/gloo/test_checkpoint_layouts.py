"""Proves that tensors saved on one mesh come back bit by bit on any other, and from one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import gloo_group, run_ranks
from test_data_parallel import open_rank, parallel, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from interlace.checkpoint.background_save import Outcome, write_checkpoint
from interlace.checkpoint.folders import folder_name
from interlace.checkpoint.manifest import Manifest
from interlace.checkpoint.tensor_files import (
    CheckpointReader,
    load_tensors,
    plan_pieces,
    whole_tensor,
)
from interlace.checkpoint.to_hugging_face import sound_manifest
from interlace.claims import Claim
from interlace.config import OptimizerConfig
from interlace.errors import RunError
from interlace.parallel.meshes import build_meshes
from interlace.ranks.small_collectives import gather_json
from interlace.train.optimizer import build_optimizer
from interlace.train.step_runners import planned_step

pytestmark = pytest.mark.gloo

SHAPES = {"square": (8, 12), "rows": (7, 4), "vector": (5,), "deep": (4, 4, 4), "number": ()}
# Each layout: the mesh, and how each tensor lies on it; other tensors are plain and replicated.
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, list[Any]]]] = {
    "tp4": ((4,), {"square": [Shard(1)], "rows": [Shard(0)], "vector": [Shard(0)]}),
    "dp2 x tp2": (
        (2, 2),
        {"square": [Shard(0), Shard(1)], "deep": [Shard(2), Shard(0)], "rows": [Replicate()] * 2},
    ),
    "replicate2 x shard2 x tp1": (
        (2, 2, 1),
        {
            "square": [Replicate(), Shard(0), Shard(1)],
            "rows": [Replicate(), Shard(0), Replicate()],
            "number": [Replicate()] * 3,
        },
    ),
    "both on one dimension": ((2, 2), {"square": [Shard(0), Shard(0)], "rows": [Shard(0)] * 2}),
    "whole": ((4,), {}),
}


def values() -> dict[str, Tensor]:
    """The same global tensors in every process."""
    draw = torch.Generator().manual_seed(3)
    found = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    found["half"] = torch.randn(6, generator=draw).bfloat16()
    found["bytes"] = torch.arange(9, dtype=torch.uint8)
    return found


def laid_out(layout: str) -> dict[str, Tensor]:
    """`values` as the ranks of a layout hold them."""
    shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape)
    return {
        name: distribute_tensor(tensor, mesh, placements[name]) if name in placements else tensor
        for name, tensor in values().items()
    }


def save(tensors: dict[str, Tensor], directory: Path, step: int) -> Outcome:
    """A checkpoint of `tensors` and nothing else."""
    pieces = plan_pieces(tensors, None)
    manifest = Manifest(step=step, mesh={}, config={}, state={}, files=(), tensors=pieces.tensors)
    claim = Claim(directory, "checkpoint.directory", "of all ranks").take(wait_s=10)
    claim.begin()
    return write_checkpoint(manifest, pieces.stage(tensors), claim, 0, None)


def child(directory: str) -> dict[str, Any]:
    """A child: everything that needs four ranks, in one go."""
    with gloo_group():
        return {
            "moved": moved(Path(directory)),
            "strided": strided(Path(directory) / "strided"),
            "opened": opened_by_torch(Path(directory)),
            "plain": plain_dcp(Path(directory) / "plain"),
            "exchanged": gather_json({"text": "\u00e9" * (10 ** int(os.environ["RANK"]))}, None),
        }


def moved(directory: Path) -> list[list[str]]:
    """For each pair of layouts, the names of tensors that came back with other bits."""
    wrong = []
    for step, source in enumerate(LAYOUTS):
        outcome = save(laid_out(source), directory, step)
        assert not outcome.error, outcome.error
        for target in LAYOUTS:
            found = {name: torch.zeros_like(t) for name, t in laid_out(target).items()}
            load_tensors(CheckpointReader(directory / folder_name(step)), found)
            for name, expected in laid_out(target).items():
                if not torch.equal(local(found[name]), local(expected)):
                    wrong.append([source, target, name])
    return wrong


def strided(directory: Path) -> list[str]:
    """Layouts that cut one dimension twice: the error of a good one, of a bad one."""
    mesh = init_device_mesh("cpu", (2, 2))
    boxes = [_StridedShard(0, split_factor=2), Shard(0)]
    outcome = save({"square": distribute_tensor(values()["square"], mesh, boxes)}, directory, 0)
    scattered = [Shard(0), _StridedShard(0, split_factor=2)]
    try:
        plan_pieces({"square": distribute_tensor(values()["square"], mesh, scattered)}, None)
    except RunError as error:
        return [outcome.error, error.message]
    return [outcome.error, ""]


def trained(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Masters of a small Llama, as a module, after a step of training on that layout."""
    meshes = build_meshes(parallel(layout), "cpu")
    rank = open_rank(layout, "llama", meshes, meshes.axis_of_group)
    step = planned_step(rank.weights, rank.strands, rank.strands.sequential, rank.constants)
    step(rank.batches)
    optimizer = build_optimizer(rank.weights.parameters, OptimizerConfig())
    optimizer.step()
    root = nn.Module()
    for name, master in rank.weights.masters.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, master)
    return root, optimizer


def plain_dcp(folder: Path) -> dict[str, bool]:
    """PyTorch's own save and load of masters and optimizer, from one layout to another."""
    model, optimizer = trained("zero3x2 tp2")
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    saved = {name: whole(each) for name, each in flat(state).items()}
    other, fresh = trained("rep2 zero1x2")
    for tensor in flat(state_of(other, fresh)).values():
        local(tensor).zero_()
    again = state_of(other, fresh)
    dcp.load(again, checkpoint_id=folder)
    set_state_dict(
        other, fresh, model_state_dict=again["model"], optim_state_dict=again["optimizer"]
    )
    loaded = flat(state_of(other, fresh))
    return {
        "same names": loaded.keys() == saved.keys(),
        "laid out": all(isinstance(p, DTensor) for p in other.parameters()),
        "there is a state": sum(name.endswith("exp_avg") for name in saved) > 8,
        "same bits": all(torch.equal(whole(loaded[name]), each) for name, each in saved.items()),
    }


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Both states as PyTorch gives them."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """All tensors in nested tables."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
    return found


def opened_by_torch(directory: Path) -> bool:
    """PyTorch's own `load` with our reader, of what `moved` saved."""
    found = {"square": torch.zeros(8, 12)}
    dcp.load(found, storage_reader=CheckpointReader(directory / folder_name(1)))
    return torch.equal(found["square"], values()["square"])


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder in which four ranks have saved, and what each rank says."""
    folder = tmp_path_factory.mktemp("layouts")
    results = run_ranks("test_checkpoint_layouts:child", 4, args=[str(folder)], timeout_s=120)
    return folder, [result.value for result in results]


Saved = tuple[Path, list[dict[str, Any]]]


def test_every_layout_loads_every_other(saved: Saved) -> None:
    """Four ranks, 5 layouts: plain, uneven rows, two axes, two axes on one dimension, three axes.
    Each loads into each; afterwards one process reads the global tensors. All bits are equal, and
    what several ranks hold is stored once."""
    folder, said = saved
    assert [each["moved"] for each in said] == [[]] * 4
    for step in range(len(LAYOUTS)):
        checkpoint = folder / folder_name(step)
        sound_manifest(checkpoint)
        reader = CheckpointReader(checkpoint)
        for name, expected in values().items():
            assert torch.equal(whole_tensor(reader, name), expected), name
        payload = sum(tensor.nbytes for tensor in values().values())
        stored = sum(path.stat().st_size - header(path) for path in checkpoint.glob("rank-*"))
        assert stored == payload


def header(path: Path) -> int:
    """Bytes of a safetensors file before its data."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_strided_shards_are_stored_where_they_lie_or_refused(saved: Saved) -> None:
    """FSDP2 over tensor parallelism cuts one dimension twice in an order of its own: stored right.
    Shards that are not boxes cannot be described, and are an error instead of wrong weights."""
    folder, said = saved
    for each in said:
        error, refusal = each["strided"]
        assert error == ""
        assert "cannot be saved or loaded" in refusal
    reader = CheckpointReader(folder / "strided" / folder_name(0))
    assert torch.equal(whole_tensor(reader, "square"), values()["square"])


def test_values_of_any_size_are_exchanged(saved: Saved) -> None:
    """Every rank sees what every other said, in order."""
    for each in saved[1]:
        assert [len(value["text"]) for value in each["exchanged"]] == [1, 10, 100, 1000]


def test_pytorch_saves_and_loads_masters_as_they_are(saved: Saved) -> None:
    """`get_state_dict`, `dcp.save`, `dcp.load` and `set_state_dict`, of weights and AdamW, from
    ZeRO-3 with tensor parallelism onto replicas of ZeRO-1: the same bits, nothing of ours."""
    for each in saved[1]:
        assert len(each["plain"]) == 4
        assert all(each["plain"].values()), each["plain"]


def test_pytorch_can_load_our_checkpoints(saved: Saved) -> None:
    """`torch.distributed.checkpoint.load(..., storage_reader=CheckpointReader(folder))`."""
    assert [each["opened"] for each in saved[1]] == [True] * 4
