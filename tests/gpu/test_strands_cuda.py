"""On one GPU: traced strands give the bits of one strand, collectives and the clock work.

Plain unittest, so that `make gpu-check` runs it where only torch and numpy are; pytest runs it too.
"""

import unittest

import torch
import torch.distributed as dist

from interlace.config import ModelConfig, ParallelConfig
from interlace.graphs import collectives
from interlace.graphs.wide_sums import ADD_WIDE, wide_sums
from interlace.measure.start_up import profile_strands
from interlace.models import model_file
from interlace.parallel.meshes import build_meshes
from interlace.ranks.determinism import nondeterminism
from interlace.ranks.process_group import process_group
from interlace.runtime.recorder import CudaClock, Recorder
from interlace.runtime.traced_strands import build_strands
from interlace.search.planner import make_plan
from interlace.train.built_model import NextTokenLoss
from interlace.train.weights import MasterWeights

SEQUENCE = 256


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class StrandsOnCuda(unittest.TestCase):
    """One rank, the process group of `interlace train`, bfloat16."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.enterClassContext(process_group())
        cls.meshes = build_meshes(ParallelConfig(tensor=1), "cuda")

    def test_two_strands_equal_one(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.assertEqual(nondeterminism(device), ())
        torch.manual_seed(0)
        config = ModelConfig(layers=2, width=256, heads=8, kv_heads=4, ffn_width=512)
        model = model_file("llama").build(config, 256, SEQUENCE).cuda()
        weights = MasterWeights(NextTokenLoss(model), torch.bfloat16)
        batches = [torch.randint(0, 256, (2, 2, SEQUENCE), device="cuda").unbind() for _ in "1234"]
        strands = build_strands(
            weights.module, batches[0], self.meshes.axis_of_group, wide_sums=wide_sums(device)
        )
        nodes = strands.graphs["backward"].graph.nodes
        self.assertTrue(any(node.target == ADD_WIDE for node in nodes))
        constants = {**weights.constants(), **weights.buffers()}
        costs = profile_strands(strands, batches[0], "cuda", constants, repeats=2, machine="test")
        plan = make_plan(strands.op_graphs, costs, "merge")
        found = {}
        for name, order in {"one": strands.sequential, "two": plan}.items():
            buffers = weights.buffers()
            losses = strands.executor(order, {**constants, **buffers}).step(batches)
            found[name] = [*losses, *buffers.values()]
        for one, two in zip(found["one"], found["two"], strict=True):
            self.assertTrue(torch.equal(one, two))
        recorder = Recorder(strands.op_graphs, CudaClock())
        strands.executor(plan, constants).step(batches, recorder)
        timeline = recorder.timeline("two", 0)
        self.assertGreater(timeline.length_ns, 0)
        self.assertTrue(all(span.end_ns >= span.start_ns for span in timeline.spans))

    def test_bfloat16_matmuls_are_added_to_float32_unrounded(self) -> None:
        """Sums of 4,096 products are away from those in float64 by less than bfloat16 can hold."""
        self.assertIn(torch.bfloat16, wide_sums(torch.device("cuda")))
        torch.manual_seed(0)
        a, b = (torch.randn(512, 4096, device="cuda").bfloat16() for _ in "ab")
        total = torch.randn(512, 512, device="cuda")
        true = total.double() + a.double() @ b.double().t()
        ADD_WIDE(total, a, b.t(), torch.float32, out=total)
        self.assertLess(((total - true).abs().max() / true.abs().max()).item(), 1e-5)

    def test_collectives_and_clock(self) -> None:
        group = dist.group.WORLD.group_name
        clock = CudaClock()
        x = torch.arange(8.0, device="cuda").reshape(4, 2)
        calls = {
            "all_gather": lambda: collectives.all_gather(x, 1, group),
            "reduce_scatter": lambda: collectives.reduce_scatter(x, "sum", 1, group),
            "all_reduce": lambda: collectives.all_reduce(x, "sum", group),
        }
        for name, call in calls.items():
            with self.subTest(name):
                stamps: list[torch.cuda.Event] = []
                pending = call()
                clock.after(pending, stamps.append)
                self.assertTrue(torch.equal(collectives.wait(pending), x))
                self.assertGreater(clock.nanoseconds(stamps[0]), 0)


if __name__ == "__main__":
    unittest.main()
