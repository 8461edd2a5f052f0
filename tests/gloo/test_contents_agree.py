"""Proves that ranks which hold other tensors, files or modules than the others are named."""

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import gloo_group, run_ranks
from torch import Tensor

import interlace
from interlace.errors import InputError, PeerError
from interlace.parallel.local_parts import local
from interlace.ranks.replicas import fingerprints

pytestmark = pytest.mark.gloo
ODD = 1


def said(check: Callable[[], None]) -> str:
    """What a check refuses, or nothing."""
    try:
        check()
    except PeerError as error:
        return f"{error.ranks}: {error.message}"
    return ""


def odd_at(rank: int) -> float:
    """Something to add on one rank of four."""
    return float(int(os.environ["RANK"]) == rank)


def test_a_class_of_a_notebook_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has one that was typed at a prompt: `__main__` is no file there, and Python says so by
    an OSError. There is nothing to compare, and nothing to end a step for."""
    from interlace.ranks.source_files import module_contents

    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    names: dict[str, Any] = {"nn": torch.nn, "__name__": "__main__"}
    exec("class Model(nn.Module): pass\ndef loss(module): pass", names)
    assert module_contents(names["Model"](), names["loss"]) == []


def primitives(folder: str) -> dict[str, str]:
    """A child of four, laid out 2 x 2: what is refused of tensors, files and models."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from interlace.ranks.agree import check_contents
    from interlace.ranks.replicas import tensor_contents
    from interlace.ranks.source_files import package_contents

    rank = int(os.environ["RANK"])
    found: dict[str, str] = {}
    with gloo_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def compare(name: str, tensors: dict[str, Tensor], **given: Any) -> None:
            found[name] = said(lambda: check_contents(tensor_contents(tensors, **given)))

        def part(value: Tensor, *placements: Any, on: Any = mesh) -> DTensor:
            return DTensor.from_local(value, on, placements, run_check=False)

        split = torch.full((3 - rank % 2, 2), float(rank % 2))  # uneven over tp
        laid_out = {
            "whole": part(torch.ones(2), Replicate(), Replicate()),
            "split": part(split, Replicate(), Shard(0)),
            "other mesh": part(split, Shard(0), on=mesh["tp"]),
            "parts": part(torch.full((1, 1), float(rank)), Shard(0), Shard(1)),
            "over dp": part(torch.full((1,), rank // 2), Shard(0), Replicate()),
        }
        compare("equal", laid_out)
        compare("replica", laid_out | {"split": part(split + odd_at(3), Replicate(), Shard(0))})
        wrong = part(split + odd_at(2), Shard(0), on=mesh["tp"])
        compare("replica of a submesh", laid_out | {"other mesh": wrong})
        plain = {"a": torch.zeros(3), "b": torch.zeros(3) * (1 - 2 * odd_at(0))}
        compare("minus zero", plain)
        nan = torch.tensor([0x7FC00000 + rank // 3], dtype=torch.int32).view(torch.float32)
        compare("payload of a NaN", {"nan": nan})
        compare("own", {"x": nan}, own={"x": (("ranks", rank),)})
        compare(
            "among ranks of tp",
            {"x": torch.tensor(rank // 2)},
            ranks=[rank // 2 * 2, rank // 2 * 2 + 1],
        )
        compare("other names", {"a": torch.zeros(1), "c" if rank == 1 else "b": torch.zeros(1)})
        many = {f"w{number}": torch.tensor(number) for number in range(600)}
        compare("of many", many | {"w555": torch.tensor(odd_at(1)), "w599": nan})
        root = Path(folder) / "copy" if rank == 2 else None
        found["code"] = said(lambda: check_contents(package_contents(root)))
        found |= models(mesh)
    return found


def models(mesh: Any) -> dict[str, str]:
    """Buffers of our models over context- and tensor-parallel ranks."""
    from interlace.config import DataConfig, ModelConfig, ParallelConfig, RunConfig
    from interlace.parallel.meshes import build_meshes
    from interlace.ranks.agree import check_contents
    from interlace.ranks.replicas import module_buffers
    from interlace.train.built_model import build_module

    found: dict[str, str] = {}
    layouts = [("llama", "ring", 4, 1), ("llama", "ulysses", 2, 2), ("gpt", "ring", 2, 2)]
    for architecture, method, context, tensor in layouts:
        config = RunConfig(
            model=ModelConfig(
                architecture=architecture, layers=1, width=32, heads=4, kv_heads=4, ffn_width=32
            ),
            parallel=ParallelConfig(context=context, tensor=tensor, context_method=method),
            data=DataConfig(sequence_length=16),
        )
        torch.manual_seed(1)
        meshes = build_meshes(config.parallel, "cpu")
        module = build_module(config, meshes, 64, torch.device("cpu"))
        name = f"{architecture} {method} {context} {tensor}"
        buffers = module_buffers(module, None)
        found[name] = said(partial(check_contents, buffers))
        differing = [len(set(values)) for values in everyone(module)]
        assert max(differing) > 1, "no buffer depends on the rank"
    return found


def everyone(module: torch.nn.Module) -> list[list[str]]:
    """Of each buffer, what the ranks hold."""
    import torch.distributed as dist

    own = [str(buffer.tolist()) for buffer in module.buffers()]
    of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, own)
    return [list(values) for values in zip(*of_ranks, strict=True)]


def test_what_ranks_must_share_is_compared_and_nothing_else(tmp_path: Path) -> None:
    """By layout, by bytes, by name; the first that differs and the ranks in the minority."""
    copy = tmp_path / "copy"
    shutil.copytree(Path(interlace.__file__).parent, copy)
    with (copy / "config.py").open("a") as file:
        file.write("# Only a comment.\n")
    fine = ("equal", "own", "among ranks of tp")
    refused = {
        "replica": "(3,): rank 3 disagrees with the other 1 about split; ",
        "replica of a submesh": "(2,): rank 2 disagrees with the other 1 about other mesh; ",
        "minus zero": "(0,): rank 0 disagrees with the other 3 about b; ",
        "payload of a NaN": "(3,): rank 3 disagrees with the other 3 about nan; ",
        "other names": "(1,): rank 1 disagrees with the other 3 about 'the compared fields'; ",
        "of many": "(1,): rank 1 disagrees with the other 3 about w555; ",
        "code": "(2,): rank 2 disagrees with the other 3 about source file 'interlace/config.py'; ",
    }
    for result in run_ranks("test_contents_agree:primitives", 4, args=[str(tmp_path)]):
        for name, message in result.value.items():
            if name in refused:
                assert message.startswith(refused[name]), (name, message)
            else:
                assert message == "", name
        assert {*fine, *refused} < result.value.keys()


class Small(torch.nn.Module):
    """A linear layer, a buffer, and dropout between two matmuls."""

    scale: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = torch.nn.Linear(4, 8, bias=False)
        self.down = torch.nn.Linear(8, 4)
        self.dropout = torch.nn.Dropout(dropout)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.down(self.dropout(self.up(x).relu()))


def loss_of(module: torch.nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def steps(folder: str) -> dict[str, str]:
    """A child of two: what `compile_step` refuses, for replicas and tensor-parallel ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    rank = int(os.environ["RANK"])
    found: dict[str, str] = {}
    with gloo_group():
        replicas = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
        tensor = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def model(on: Any, dropout: float = 0.0) -> Small:
            made = Small(dropout)
            if on is tensor:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(made, tensor, plan)
            return made

        def compiled(module: torch.nn.Module, on: Any, **given: Any) -> Any:
            example = (torch.ones(2, 4),)
            return interlace.compile_step(module, loss_of, example, mesh=on, strands=1, **given)

        def attempt(name: str, on: Any, change: Callable[[Small], Any], **given: Any) -> None:
            made = model(on, given.pop("dropout", 0.0))
            if rank == ODD:
                with torch.no_grad():
                    change(made)
            found[name] = said(lambda: compiled(made, on, **given) and None)

        attempt("replicas, equal", replicas, lambda m: None)
        attempt("replicas", replicas, lambda m: m.up.weight[3].mul_(2))
        attempt("replicas, own", replicas, lambda m: m.up.weight.mul_(2), per_rank=["up.*"])
        attempt("no mesh", None, lambda m: m.down.bias.add_(1))
        attempt("no mesh, own", None, lambda m: m.down.bias.add_(1), per_rank=["down.bias"])
        attempt("tp, equal", tensor, lambda m: None)
        attempt("tp, shards", tensor, lambda m: local(m.up.weight).mul_(2))
        attempt("tp, whole", tensor, lambda m: local(m.down.bias).add_(1))
        attempt("tp, buffer", tensor, lambda m: m.scale.mul_(2))
        attempt("tp, own buffer", tensor, lambda m: m.scale.mul_(2), per_rank=["sca*"])
        attempt("tp, seed", tensor, lambda m: torch.manual_seed(9), dropout=0.5)
        attempt("tp, seed unused", tensor, lambda m: torch.manual_seed(9))
        attempt("replicas, seed", replicas, lambda m: torch.manual_seed(9), dropout=0.5)
        made = model(replicas)
        step = compiled(made, replicas)
        step([(torch.ones(2, 4),)])
        found["later, equal"] = said(step.check_ranks)
        if rank == ODD:
            made.up.weight.data[0, :2] = made.up.weight.data[0, :2].flip(0)
        found["later"] = said(step.check_ranks)
        sys.path.insert(0, str(Path(folder) / str(rank)))
        theirs = importlib.import_module("their_model").Theirs()
        found["code"] = said(lambda: compiled(theirs, replicas))
        with pytest.raises(InputError, match="per_rank names 'upp'"):
            compiled(model(replicas), replicas, per_rank=["upp"])
    return found


THEIRS = """
import torch

class Theirs(torch.nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(4, 4)

    def forward(self, x):
        return {expression}
"""


def test_compile_step_compares_modules(tmp_path: Path) -> None:
    """Weights, buffers, seeds and the user's code; shards and what is named may differ."""
    for rank, expression in enumerate(("super().forward(x) * 2", "super().forward(x) * 3")):
        (tmp_path / str(rank)).mkdir()
        text = THEIRS.format(expression=expression)
        (tmp_path / str(rank) / "their_model.py").write_text(text)
    refused = {
        "replicas": "parameter 'up.weight'",
        "replicas, own": "parameter 'up.weight'",  # gradients are averaged over replicas
        "no mesh": "parameter 'down.bias'",
        "tp, whole": "parameter 'down.bias'",
        "tp, buffer": "buffer 'scale'",
        "tp, seed": "torch.initial_seed()",
        "later": "parameter 'up.weight'",
        "code": "source file 'their_model'",
    }
    for result in run_ranks("test_contents_agree:steps", 2, args=[str(tmp_path)]):
        for name, message in result.value.items():
            wanted = refused.get(name)
            about = f"(1,): rank 1 disagrees with the other 1 about {wanted}; " if wanted else ""
            assert message.startswith(about), (name, message)
            assert bool(message) == bool(wanted), (name, message)
        assert refused.keys() < result.value.keys()


def test_every_bit_and_its_place_are_in_a_fingerprint() -> None:
    """Of all dtypes, sizes and strides; also where the last word is not full, or not aligned."""
    draw = torch.Generator().manual_seed(0)
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.bool,
        torch.uint8,
    ):
        for size in (0, 1, 7, 8, 100):
            x = torch.randint(0, 2, (size,), generator=draw).to(dtype)
            changed = [x.clone() for _ in range(size)]
            for place, other in enumerate(changed):
                other[place] = 1 - other[place].to(torch.int64)
            digests = fingerprints([x, *changed])
            assert len(set(digests)) == size + 1
            padded = torch.cat((torch.ones(3).to(dtype), x))
            assert fingerprints([padded[3:]]) == digests[:1]
    whole = torch.randn(300, 1000, generator=draw)  # several pieces
    swapped = whole.clone()
    swapped[[0, 299]] = swapped[[299, 0]]
    digests = fingerprints([whole, swapped, whole.t(), whole.reshape(1000, 300), whole.double()])
    assert len(set(digests)) == 5
    assert fingerprints([whole.t().contiguous().t()]) == digests[:1]
    meta = [torch.empty(3, device="meta"), torch.empty(4, device="meta")]
    assert len(set(fingerprints(meta))) == 2
