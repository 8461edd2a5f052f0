"""Two ranks of NCCL: plain, recorded and one-strand steps have the same bits, also where freed
memory is filled with NaN while a peer is late; collectives of two groups get their own ends; and
every layout has eager PyTorch's gradients.

Plain unittest, so that `make gpu-check` runs it where only torch and numpy are; pytest runs it too.
The ranks are this file, started by torch's own launcher: `test_ranks_cuda.py NAME`.
"""

import unittest
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import nccl_ranks
import torch
import torch.distributed as dist
from torch import Tensor, fx

from interlace.config import (
    CompareConfig,
    DataConfig,
    ModelConfig,
    OverlapConfig,
    ParallelConfig,
    PlanConfig,
    RunConfig,
    TrainConfig,
)
from interlace.graphs import collectives
from interlace.model_config import ExpertsConfig
from interlace.ranks.agree import check_agreement, environment_fields
from interlace.ranks.process_group import process_group
from interlace.runtime.executor import Batch
from interlace.runtime.recorder import CudaClock, Recorder, clock_for
from interlace.step import Step
from interlace.train.gradient_check import check_gradients
from interlace.train.opening import open_session
from interlace.train.rank_job import job_of_rank
from interlace.train.session import Session

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
SMALL = replace(
    LARGE,
    model=ModelConfig(layers=2, width=256, heads=8, kv_heads=4, ffn_width=512),
    data=DataConfig(sequence_length=256),
    plan=PlanConfig(cluster="h100"),
    compare=CompareConfig(steps=1, modes=("eager", "1", "2")),
)
MIXTURE = replace(
    SMALL.model, architecture="moe", experts=ExpertsConfig(count=4, chosen=2, shared_width=64)
)
LAYOUTS = {
    "tensor": SMALL,
    "tensor, captured": replace(SMALL, train=replace(SMALL.train, cuda_graph=True)),
    "tensor, ring": replace(SMALL, overlap=OverlapConfig(decompose="ring")),
    "tensor, direct": replace(SMALL, overlap=OverlapConfig(decompose="direct")),
    "zero 3": replace(SMALL, parallel=ParallelConfig(data_shard=RANKS)),
    "zero 3, captured": replace(
        SMALL,
        parallel=ParallelConfig(data_shard=RANKS),
        train=replace(SMALL.train, cuda_graph=True),
    ),
    "zero 1": replace(SMALL, parallel=ParallelConfig(data_shard=RANKS, zero=1)),
    "replicas": replace(SMALL, parallel=ParallelConfig(data_replicate=RANKS)),
    "context": replace(SMALL, parallel=ParallelConfig(context=RANKS)),
    "context, ring": replace(SMALL, parallel=ParallelConfig(context=RANKS, context_method="ring")),
    "experts": replace(
        SMALL, model=MIXTURE, parallel=ParallelConfig(data_shard=RANKS, expert=RANKS)
    ),
    "experts, merged": replace(
        SMALL,
        model=MIXTURE,
        parallel=ParallelConfig(data_shard=RANKS, expert=RANKS, expert_sends="merged"),
    ),
}


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


def ways(session: Session, batches: Sequence[Batch]) -> list[str]:
    """How bits of a step depend on the way in which it runs; they do not."""
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


def opened(config: RunConfig) -> tuple[Session, list[Batch]]:
    """A session, and micro-batches of a step."""
    session = open_session(job_of_rank(config))
    source = session.batches()
    return session, [session.move(next(source)) for _ in range(config.train.micro_batches)]


def steps(config: RunConfig = LARGE) -> list[str]:
    """A rank: a step of bfloat16 whose transfers are long, planned from measured times."""
    with process_group(config.link, config.watchdog):
        check_agreement(environment_fields())
        return ways(*opened(config))


def layouts() -> list[str]:
    """A rank: ways to lay a model out. Raises if gradients are not those of eager PyTorch."""
    faults = []
    with process_group(LARGE.link, LARGE.watchdog):
        for name, config in LAYOUTS.items():
            session, batches = opened(config)
            text, _ = check_gradients(session, batches)
            print(name, text.splitlines()[-1], flush=True)
            faults += [f"{name}, {each}" for each in ways(session, batches)]
    return faults


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


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class RanksOnCuda(unittest.TestCase):
    """Two ranks of NCCL, as torchrun starts them."""

    def test_all_ways_to_run_a_step_have_the_same_bits(self) -> None:
        self._start("steps")

    def test_every_layout_has_the_gradients_of_eager_pytorch(self) -> None:
        self._start("layouts")

    def test_collectives_of_two_groups_have_their_own_ends(self) -> None:
        self._start("lanes")

    def _start(self, name: str) -> None:
        nccl_ranks.run_ranks(self, __file__, name, RANKS, LIMIT_S)


if __name__ == "__main__":
    nccl_ranks.have_own_gpus()
    nccl_ranks.main({"steps": steps, "layouts": layouts, "lanes": lanes})
