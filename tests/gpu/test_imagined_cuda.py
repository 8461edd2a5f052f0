"""On one GPU: a rank of an imagined cluster. Values, the time that a collective takes, strands.

Plain unittest, so that `make gpu-check` runs it where only torch and numpy are; pytest runs it too.
"""

import unittest
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from interlace.bench.imagined import ImaginedCase, measure
from interlace.graphs import collectives
from interlace.graphs.torch_private import compile_elementwise
from interlace.hardware.cluster import load_cluster
from interlace.ir.graph import Kind
from interlace.lab.imagined_world import ImaginedWorld, imagined_world

RANKS = 8


def _world(slower: float = 1.0) -> AbstractContextManager[ImaginedWorld]:
    cluster = load_cluster("a800")
    return imagined_world(cluster, RANKS, slower=slower, compile_kernel=compile_elementwise)


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class ImaginedOnCuda(unittest.TestCase):
    """Rank 0 of 8 on an A800 host."""

    def test_values(self) -> None:
        """The same as on the CPU, ready when the stream that waited goes on."""
        with _world():
            group = dist.group.WORLD.group_name
            x = torch.randn(RANKS * 4, 64, device="cuda", dtype=torch.bfloat16)
            own = x[:4]
            found = {
                "gather": collectives.wait(collectives.all_gather(own, RANKS, group)),
                "scatter": collectives.wait(collectives.reduce_scatter(x, "sum", RANKS, group)),
                "reduce": collectives.wait(collectives.all_reduce(x, "sum", group)),
            }
            wanted = {"gather": own.repeat(RANKS, 1), "scatter": own * RANKS, "reduce": x * RANKS}
            for name, tensor in wanted.items():
                with self.subTest(name):
                    self.assertTrue(torch.equal(found[name], tensor))
            functional = torch.ops._c10d_functional
            y = functional.wait_tensor(functional.all_gather_into_tensor(own, RANKS, group))
            self.assertTrue(torch.equal(y, wanted["gather"]))

    def test_a_collective_takes_its_time(self) -> None:
        """A queue of ten takes ten times as long as the model says for one, and at most half more;
        the host does not wait; with free transfers it takes less."""
        with _world(slower=20.0) as world:
            group = dist.group.WORLD.group_name
            x = torch.randn(2**20, device="cuda")
            full_bytes = RANKS * x.numel() * x.element_size()
            wanted_ms = 10 * world.duration_ns(Kind.ALL_GATHER, full_bytes, range(RANKS)) / 1e6

            def queue_ms() -> float:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
                start.record()
                pending = [collectives.all_gather(x, RANKS, group) for _ in range(10)]
                self.assertFalse(pending[-1].work.is_completed() and wanted_ms > 100)
                for each in pending:
                    collectives.wait(each)
                end.record()
                end.synchronize()
                return start.elapsed_time(end)

            queue_ms()  # compiles the kernels
            passed_ms = queue_ms()
            self.assertGreaterEqual(passed_ms, 0.99 * wanted_ms)
            self.assertLess(passed_ms, 1.5 * wanted_ms)
            with world.free_transfers():
                self.assertLess(queue_ms(), wanted_ms)

    def test_strands(self) -> None:
        """The bench itself, on small layers: it fails unless all orders give the same bits."""
        case = ImaginedCase(
            cluster="a800", world=RANKS, model="small", layers=1, slower=1.0, steps=2
        )
        rows, label = measure(case)
        self.assertEqual(label, "imagined cluster a800, world 8")
        self.assertIn("mfu_vs_no_communication", {row.metric for row in rows})


if __name__ == "__main__":
    unittest.main()
