"""On one GPU: what this project did not write has eager PyTorch's numbers, or is refused by name.

The tables of architectures and habits of `tests/gloo`, and ways in which people train: FSDP2 and
DDP of one rank on NCCL, and two ranks that share the GPU and exchange over gloo. Needs transformers
and pytest beside what `make gpu-check` asks for, and is skipped without them.
"""

import importlib.util
import os
import re
import subprocess
import sys
import unittest
import warnings
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
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


def shared_gpu() -> None:
    """A rank of two on one GPU: tensor parallel over gloo, with one strand and two."""
    torch.cuda.set_device(0)
    setUpModule()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    found = []
    for strands in (2, 1):
        module = layers()
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        step = interlace.compile_step(
            module, square, inputs()[0], mesh=mesh, strands=strands, config=QUICK
        )
        step(inputs())
        grads = [getattr(p.grad, "_local_tensor", p.grad) for p in module.parameters()]
        found.append([*step.losses, *grads])
        print(f"furthest {furthest(module):.2e}", flush=True)
    print("bits", all(torch.equal(a, b) for a, b in zip(*found, strict=True)), flush=True)
    dist.destroy_process_group()


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class WaysToTrainOnCuda(unittest.TestCase):
    """Modules in PyTorch's own wrappers."""

    def test_fsdp2_and_ddp_on_nccl(self) -> None:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        for name in ("dp_shard", "dp_replicate"):
            with self.subTest(name):
                module: Any = layers()
                mesh = init_device_mesh("cuda", (1,), mesh_dim_names=(name,))
                wrapped = DistributedDataParallel(module) if name == "dp_replicate" else module
                if name == "dp_shard":
                    for layer in (*module.children(), module):
                        fully_shard(layer, mesh=mesh)
                for options in ({}, {"cuda_graph": True}):
                    step = interlace.compile_step(
                        wrapped, square, inputs()[0], mesh=mesh, config=QUICK, **options
                    )
                    for _ in range(3):
                        module.zero_grad()
                        step(inputs())
                        self.assertLess(furthest(module), 1e-5)

    def test_two_ranks_on_one_gpu(self) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*launcher, "--nproc-per-node=2", __file__],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stdout[-4000:])
        self.assertEqual(done.stdout.count("bits True"), 2, done.stdout[-4000:])
        errors = [float(each) for each in re.findall(r"furthest (\S+)", done.stdout)]
        self.assertEqual(len(errors), 4)
        self.assertLess(max(errors), 1e-5)


if __name__ == "__main__":
    shared_gpu()
