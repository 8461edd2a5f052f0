"""On one GPU: a step that is captured as a CUDA graph has the bits of one that is not.

Plain unittest, so that `make gpu-check` runs it where only torch and numpy are; pytest runs it too.
"""

import os
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import interlace
from interlace.config import PlanConfig
from interlace.errors import InterlaceError
from interlace.graphs.torch_private import compile_elementwise
from interlace.hardware.cluster import load_cluster
from interlace.lab.imagined_world import imagined_world

QUICK = PlanConfig(cluster="h100", search="list")
STEPS = 4
RANKS = 8


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Reading(nn.Module):
    """Its kernels depend on a number that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * x.abs().max().to("cpu")


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def blocks(**given: Any) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(64, **given) for _ in range(2))).cuda()


def micro_batches(count: int = 4) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(4)
    return [(torch.randn(16, 64, device="cuda"),) for _ in range(count)]


def compiled(module: nn.Module, **options: Any) -> interlace.Step:
    return interlace.compile_step(module, loss, micro_batches()[0], config=QUICK, **options)


def trained(module: nn.Module, step: interlace.Step, steps: int = STEPS) -> list[Tensor]:
    """Losses, gradients and weights of some steps on other micro-batches each time."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    found = []
    for number in range(steps):
        batches = [(x + number,) for (x,) in micro_batches()]
        step(batches)
        found += [*step.losses, *(p.grad.clone() for p in module.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [each.clone() for each in (*found, *module.parameters())]


def refused(call: Callable[[], object]) -> str:
    """What the error of this call says."""
    try:
        call()
    except InterlaceError as error:
        return str(error)
    raise AssertionError("nothing was refused")


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class CapturedOnCuda(unittest.TestCase):
    """Steps of `compile_step`; deterministic kernels."""

    def setUp(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    def same(self, found: list[Tensor], wanted: list[Tensor]) -> None:
        self.assertEqual(len(found), len(wanted))
        for one, other in zip(found, wanted, strict=True):
            self.assertTrue(torch.equal(one, other))

    def test_captured_steps_have_the_same_bits(self) -> None:
        """Weights move, micro-batches differ, and every kernel reads what is there now."""
        plain = trained(module := blocks(), compiled(module))
        for strands in (1, 2):
            with self.subTest(strands=strands):
                step = compiled(module := blocks(), strands=strands, cuda_graph=True)
                self.same(trained(module, step), plain)

    def test_other_numbers_of_micro_batches(self) -> None:
        module, twin = blocks(), blocks()
        captured, plain = compiled(module, cuda_graph=True), compiled(twin)
        for count in (4, 2, 4, 3, 2, 4):
            batches = micro_batches(count)
            self.assertEqual(float(captured(batches)), float(plain(batches)))
            self.same([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])

    def test_replaced_parameters_are_read(self) -> None:
        module, twin = blocks(), blocks()
        steps = compiled(module, cuda_graph=True), compiled(twin)
        for number in range(4):
            for each, step in zip((module, twin), steps, strict=True):
                if number == 2:
                    each[0].up.weight = nn.Parameter(each[0].up.weight.detach() * 0.5)
                step(micro_batches())
            self.same(steps[0].losses, steps[1].losses)
        self.same([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])

    def test_recorded_steps(self) -> None:
        """The stamps of a replay: every operator, none of negative length, and the same bits."""
        module, twin = blocks(), blocks()
        captured, plain = compiled(module, cuda_graph=True), compiled(twin)
        for step in (captured, plain):
            step(micro_batches())
        timeline, wanted = captured.record(micro_batches()), plain.record(micro_batches())
        self.assertEqual(len(timeline.spans), len(wanted.spans))
        self.assertTrue(all(span.end_ns >= span.start_ns for span in timeline.spans))
        self.assertLess(timeline.length_ns, wanted.length_ns)
        self.same(captured.losses, plain.losses)
        self.same([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])
        self.same([captured(micro_batches())], [plain(micro_batches())])

    def test_what_cannot_be_captured_is_refused(self) -> None:
        dropping, reading = blocks(dropout=0.1), Reading().cuda()
        self.assertIn("seeds of dropout", refused(lambda: compiled(dropping, cuda_graph=True)))
        self.assertIn("the host waits", refused(lambda: compiled(reading, cuda_graph=True)))

    def test_a_capture_that_fails_says_so(self) -> None:
        """The step before it has run."""
        step = compiled(blocks(), cuda_graph=True)
        usual = step.executor.step

        def synchronizes(*args: Any) -> list[Tensor]:
            losses = usual(*args)
            losses[0].item()
            return losses

        step.executor.step = synchronizes  # type: ignore[method-assign]
        said = refused(lambda: step(micro_batches()))
        self.assertIn("cannot be captured in a CUDA graph", said)
        torch.cuda.synchronize()
        torch.randn(4, device="cuda")  # torch's generator is none of a capture any more

    def test_collectives_are_captured(self) -> None:
        """Tensor parallel, as a rank of an imagined cluster."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        found = []
        with imagined_world(
            load_cluster("h100"), RANKS, slower=1.0, compile_kernel=compile_elementwise
        ):
            mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("tp",))
            for options in ({}, {"cuda_graph": True}, {"cuda_graph": True, "strands": 1}):
                module = blocks()
                plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
                parallelize_module(module, mesh, plan, src_data_rank=None)
                step = compiled(module, mesh=mesh, **options)
                for _ in range(3):
                    step(micro_batches())
                timeline = step.record(micro_batches())
                self.assertTrue(any(span.lane == "tp" for span in timeline.spans))
                grads = [p.grad for p in module.parameters()]
                found.append([*step.losses, *(getattr(g, "_local_tensor", g) for g in grads)])
        self.same(found[1], found[0])
        self.same(found[2], found[0])


if __name__ == "__main__":
    unittest.main()
