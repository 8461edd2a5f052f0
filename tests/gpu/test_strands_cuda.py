"""On one GPU: traced strands give the bits of one strand, collectives and the clock work.

Plain unittest, so that `make gpu-check` runs it where only torch is installed; pytest runs it too.
"""

import os
import unittest

import torch
import torch.distributed as dist

from interlace.config import ModelConfig, ParallelConfig
from interlace.graphs import collectives
from interlace.models import model_file
from interlace.models.loss import NextTokenLoss
from interlace.parallel.meshes import build_meshes
from interlace.runtime.profile import profile_strands
from interlace.runtime.recorder import CudaClock, Recorder
from interlace.runtime.strands import build_strands
from interlace.search.planner import make_plan
from interlace.train.weights import MasterWeights

SEQUENCE = 256


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class StrandsOnCuda(unittest.TestCase):
    """One rank, NCCL, bfloat16."""

    @classmethod
    def setUpClass(cls) -> None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29555")
        dist.init_process_group("nccl", rank=0, world_size=1)
        cls.meshes = build_meshes(ParallelConfig(tensor=1), "cuda")

    @classmethod
    def tearDownClass(cls) -> None:
        dist.destroy_process_group()

    def test_two_strands_equal_one(self) -> None:
        torch.manual_seed(0)
        config = ModelConfig(layers=2, width=256, heads=8, kv_heads=4, ffn_width=512)
        model = model_file("llama").build(config, 256, SEQUENCE).cuda()
        weights = MasterWeights(NextTokenLoss(model), torch.bfloat16)
        batches = [torch.randint(0, 256, (2, 2, SEQUENCE), device="cuda").unbind() for _ in "1234"]
        strands = build_strands(weights.module, batches[0], self.meshes.axis_of_group)
        constants = {**weights.constants(), **weights.buffers()}
        costs = profile_strands(strands, batches[0], "cuda", constants, repeats=2, machine="test")
        plan = make_plan(strands.op_graphs, costs, "exact")
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
