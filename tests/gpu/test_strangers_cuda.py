"""On one GPU: what this project did not write has eager PyTorch's numbers, or is refused by name.

The tables of architectures and habits of `tests/gloo`, and ways in which people train: FSDP2, DDP
and tensor parallel on NCCL, and two ranks that exchange over gloo. The tables need transformers and
pytest beside what `make gpu-check` asks for, and are skipped without them.
"""

import importlib.util
import os
import unittest
import warnings
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import nccl_ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import interlace
from interlace.config import PlanConfig

QUICK = PlanConfig(cluster="h100", search="list")
LACKING = [name for name in ("transformers", "pytest") if not importlib.util.find_spec(name)]
OF_A_MESH = {"an equal mesh of its own", "fully_shard"}
"""Cases that lay themselves out over CPU ranks."""
MOST_REFUSED = 12
"""Of some 47. Older versions of transformers and torch than the tests of the CPU run with branch on
random numbers (layer drop), and their experts loop over rows where float32 has no grouped matmul.
"""
LIMIT_S = 200
WAYS = "dp_shard", "dp_replicate", "tp"
BOUND = 1e-5
"""Of gradients in float32, relative to the largest element."""


def setUpModule() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
@unittest.skipIf(bool(LACKING), f"not installed: {', '.join(LACKING)}")
class StrangersOnCuda(unittest.TestCase):
    """Modules by the table, each four optimizer steps beside an eager twin."""

    def test_right_or_refused(self) -> None:
        import test_architectures

        os.environ.update(RANK="0", WORLD_SIZE="1")
        self.addCleanup(torch.set_default_device, None)
        torch.set_default_device("cuda")
        refused = []
        rows = test_architectures.ROWS[1]
        for case, optimizer in zip(rows, cycle(test_architectures.OPTIMIZERS), strict=False):
            if case.name in OF_A_MESH:
                continue
            with self.subTest(case.name):
                found = test_architectures.outcome(case, optimizer)
                if found.startswith("refused: "):
                    refused.append(case.name)
                    self.assertIn("hint: ", found)
                elif not case.refused:
                    self.assertEqual(found, "right")
        print("refused:", ", ".join(refused))
        self.assertLessEqual(len(refused), MOST_REFUSED)

    def test_a_llama_of_transformers_in_bfloat16(self) -> None:
        """Two strands, one, and captured ones have the same bits; eager's losses are near."""
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=3,
            num_attention_heads=8, num_key_value_heads=4,
        )  # fmt: skip
        batches = [(torch.randint(0, 512, (2, 256), device="cuda"),) for _ in range(4)]
        found = []
        for options in ({}, {"strands": 1}, {"cuda_graph": True}):
            torch.manual_seed(0)
            module = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
            step = interlace.compile_step(module, causal_loss, batches[0], config=QUICK, **options)
            for _ in range(3):
                module.zero_grad()
                step(batches)
            found.append([*step.losses, *(p.grad.clone() for p in module.parameters())])
            for own, batch in zip(step.losses, batches, strict=True):
                self.assertLess(abs(float(own) - float(causal_loss(module, *batch))), 2e-2)
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                self.assertTrue(torch.equal(one, two))


def causal_loss(module: nn.Module, tokens: Tensor) -> Tensor:
    return module(input_ids=tokens, labels=tokens, use_cache=False).loss


def square(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda()


def inputs() -> list[tuple[Tensor, ...]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 64, device="cuda"),) for _ in range(4)]


def wanted() -> list[Tensor]:
    """Gradients of the mean loss by eager autograd."""
    twin = layers()
    for batch in inputs():
        (square(twin, *batch) / 4).backward()
    return [p.grad for p in twin.parameters() if p.grad is not None]


def furthest(module: nn.Module) -> float:
    """The largest difference of this rank's part of a gradient to eager's, relative to the largest
    element. Nothing is gathered: gloo cannot, on a GPU."""
    worst = 0.0
    for parameter, whole in zip(module.parameters(), wanted(), strict=True):
        found, true = parameter.grad, whole
        if isinstance(found, DTensor):
            for placement in found.placements:
                if isinstance(placement, Shard):
                    true = true.chunk(dist.get_world_size(), placement.dim)[dist.get_rank()]
            found = found.to_local()
        assert found is not None
        worst = max(worst, float((found - true).abs().max() / whole.abs().max()))
    return worst


def laid_out(name: str, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """(what `compile_step` is given, the layers) under a way of PyTorch's to share them."""
    module: Any = layers()
    if name == "dp_replicate":
        return DistributedDataParallel(module), module
    if name == "dp_shard":
        for layer in (*module.children(), module):
            fully_shard(layer, mesh=mesh)
    else:
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return module, module


def in_ways(name: str, ways: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with steps of the group's ranks: their gradients are not near eager's, or have
    other bits than those of the first way."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=(name,))
    faults, found = [], []
    for options in ways:
        wrapped, module = laid_out(name, mesh)
        step = interlace.compile_step(
            wrapped, square, inputs()[0], mesh=mesh, config=QUICK, **options
        )
        for _ in range(3):
            module.zero_grad()
            step(inputs())
            off = furthest(module)
            faults += [] if off < BOUND else [f"{name} {options}: gradients are {off:.1e} off"]
        grads = [getattr(p.grad, "_local_tensor", p.grad) for p in module.parameters()]
        found.append([*step.losses, *grads])
        if not all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True)):
            faults.append(f"{name} {options}: other bits")
    return faults


def over_nccl() -> list[str]:
    """A rank: FSDP2, DDP and tensor parallel with two strands, one, and captured."""
    with nccl_ranks.nccl_group():
        ways: list[dict[str, Any]] = [{}, {"strands": 1}, {"cuda_graph": True}]
        return [each for name in WAYS for each in in_ways(name, ways)]


def over_gloo() -> list[str]:
    """A rank: tensor parallel, which only adds up."""
    torch.cuda.set_device(0)
    setUpModule()
    dist.init_process_group("gloo")
    faults = in_ways("tp", [{}, {"strands": 1}])
    dist.destroy_process_group()
    return faults


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class WaysToTrainOnCuda(unittest.TestCase):
    """Modules in PyTorch's own wrappers."""

    def test_one_rank_on_nccl(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "over_nccl", 1, LIMIT_S)

    def test_two_ranks_on_nccl(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "over_nccl", 2, LIMIT_S)

    def test_two_ranks_on_gloo(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "over_gloo", 2, LIMIT_S)


if __name__ == "__main__":
    nccl_ranks.main({"over_nccl": over_nccl, "over_gloo": over_gloo})
