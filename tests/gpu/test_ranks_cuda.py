"""On two GPUs: plain, recorded and one-strand steps have the same bits, also where freed memory is
filled with NaN while a peer is late; and collectives of two groups get their own ends.

Plain unittest, so that `make gpu-check` runs it where only torch and numpy are; pytest runs it too.
The ranks are this file, started by torch's own launcher: `test_ranks_cuda.py NAME`.
"""

import subprocess
import sys
import unittest
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from interlace.config import (
    CompareConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PlanConfig,
    RunConfig,
    TrainConfig,
)
from interlace.graphs import collectives
from interlace.ranks.agree import check_agreement, environment_fields
from interlace.ranks.process_group import process_group
from interlace.runtime.executor import Batch
from interlace.runtime.recorder import CudaClock, Recorder, clock_for
from interlace.step import Step
from interlace.train.opening import open_session
from interlace.train.rank_job import job_of_rank

RANKS = 2
LIMIT_S = 300
LATE_CYCLES = 10_000_000
"""About 5 ms, for which rank 1 holds back each of its collectives."""
LARGE = RunConfig(
    model=ModelConfig(layers=2, width=1024, heads=16, kv_heads=8, ffn_width=2816),
    data=DataConfig(sequence_length=4096),
    parallel=ParallelConfig(tensor=RANKS),
    train=TrainConfig(micro_batches=4, micro_batch_size=1, dtype="bfloat16"),
    plan=PlanConfig(cache=False, profile_repeats=2),
    compare=CompareConfig(steps=1, modes=("1", "2")),
)


class Poisoning(Recorder):
    """After each operator, fills what the allocator has got back with NaN; rank 1 is late with its
    collectives, so that rank 0's are still under way then."""

    def _step(self, node: fx.Node, values: dict[fx.Node, Any], *rest: Any) -> Any:
        is_collective = "collective" in node.meta
        on_gpu = self.clock.device_type == "cuda"
        if is_collective and on_gpu and dist.get_rank() == 1:
            torch.cuda._sleep(LATE_CYCLES)
        result = super()._step(node, values, *rest)
        for size in self.sizes():
            torch.empty(size, dtype=torch.uint8, device=self.clock.device_type).fill_(255)
        return result

    def sizes(self) -> Sequence[int]:
        """Bytes of what collectives read."""
        ops = [op for graph in self.graphs.values() for op in graph.operators]
        return sorted({op.bytes_in for op in ops if op.is_collective})


def bits(step: Step, batches: Sequence[Batch], recorder: Recorder | None) -> list[Tensor]:
    """Losses and gradient sums of a step."""
    step.tensors.begin(batches)
    losses = step.executor.step(batches, recorder)
    sums = [value for (role, _), value in step.tensors.constants.items() if "gradient" in role]
    return [x.clone() for x in (*losses, *sums)]


def steps(config: RunConfig = LARGE) -> list[str]:
    """A rank: how bits of a step depend on the way in which it runs; they do not."""
    with process_group(config.link, config.watchdog):
        check_agreement(environment_fields())
        session = open_session(job_of_rank(config))
        source = session.batches()
        batches = [session.move(next(source)) for _ in range(config.train.micro_batches)]
        one, two = session.runners["1"], session.runners["2"]
        assert isinstance(one, Step)
        assert isinstance(two, Step)
        clock, graphs = clock_for(session.device.type), two.strands.op_graphs
        wanted = bits(one, batches, None)
        found = {
            "one strand again": bits(one, batches, None),
            "two strands": bits(two, batches, None),
            "two strands, recorded": bits(two, batches, Recorder(graphs, clock)),
            "one strand, poisoned": bits(one, batches, Poisoning(graphs, clock)),
            "two strands, poisoned": bits(two, batches, Poisoning(graphs, clock)),
        }
        return [
            f"{name}: {index} of {len(wanted)} differs"
            for name, values in found.items()
            for index, (x, y) in enumerate(zip(wanted, values, strict=True))
            if not torch.equal(x, y)
        ]


def lanes() -> list[str]:
    """A rank: a short collective that is issued behind long ones of another group ends first."""
    with process_group(LARGE.link, LARGE.watchdog):
        first, second = (dist.new_group(list(range(RANKS))) for _ in "12")
        large, small = (torch.ones(size, device="cuda") for size in (2**26, 2**10))
        for group, x in ((first, large), (second, small)):  # makes the communicators
            collectives.wait(collectives.all_gather(x, RANKS, group.group_name))
        clock, stamps = CudaClock(), []
        long = [collectives.all_gather(large, RANKS, first.group_name) for _ in range(20)]
        for pending in (*long, collectives.all_gather(small, RANKS, second.group_name)):
            clock.after(pending, stamps.append)
        *long_ns, short_ns = map(clock.nanoseconds, stamps)
    return [] if short_ns < long_ns[-1] else [f"short {short_ns} ns, long {long_ns[-1]} ns"]


class RanksOnCuda(unittest.TestCase):
    """Two ranks of NCCL, as torchrun starts them."""

    def setUp(self) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count < RANKS:
            self.skipTest(f"needs {RANKS} CUDA devices, and there are {count}")

    def test_all_ways_to_run_a_step_have_the_same_bits(self) -> None:
        self._start("steps")

    def test_collectives_of_two_groups_have_their_own_ends(self) -> None:
        self._start("lanes")

    def _start(self, name: str) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc-per-node={RANKS}", __file__, name]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
        )
        self.assertEqual(done.returncode, 0, done.stdout.decode(errors="replace")[-8000:])


if __name__ == "__main__":
    faults = {"steps": steps, "lanes": lanes}[sys.argv[1]]()
    print("\n".join(faults), flush=True)
    sys.exit(bool(faults))
