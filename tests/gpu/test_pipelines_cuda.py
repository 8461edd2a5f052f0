"""Pipelines between ranks of NCCL have the bits of one strand on one rank, ours behind PyTorch's
interface its numbers, and PyTorch's with two strands the bits of its own; gloo is refused.

Takes modules of `tests/gloo`, and is skipped where what those import is not installed.
"""

import importlib.util
import os
import signal
import time
import unittest
from unittest import mock

import nccl_ranks
import torch
import torch.distributed as dist
from nccl_ranks import nccl_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.errors import InputError, RunError
from interlace.ir.actions import Action
from interlace.runtime.executor import StepRun

LACKING = [name for name in ("pytest",) if not importlib.util.find_spec(name)]
LIMIT_S = 300
MICRO_BATCHES = 5
WAIT_S = 15.0
HAS_RUNTIME = (2, 13) <= torch.__version__ < (2, 15)
"""Whether this torch has the runtime that `install_overlap` knows."""


def every_schedule(*, one_communicator: bool = False) -> list[str]:
    """A rank: what differs from one strand, by schedule. Waits that are in another order on two
    ranks would never end, as NCCL sends in the order of a stream."""
    from test_pipeline_step import SCHEDULES, LongSkip, built, differing, language, wanted
    from traced_once import traced_once

    def on_gpu() -> LongSkip:
        return built().cuda()

    found = []
    with nccl_group(one_communicator=one_communicator), traced_once():
        mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("pp",))
        batches = [tuple(x.cuda() for x in batch) for batch in language(MICRO_BATCHES)]
        right = wanted(on_gpu, batches)
        for schedule in SCHEDULES:
            of_rank = differing(on_gpu, batches, mesh, schedule, right)
            found += [f"{schedule}: {name} differs" for name in of_rank["wrong"]]
            print(schedule, len(of_rank["own"]), "gradients", flush=True)
    return found


def their_interface() -> list[str]:
    """A rank: raises unless schedules of ours, stepped as one of PyTorch's, are near eager code."""
    from stage_models import data, mlps, own_stages
    from test_pipelining import made, right_step

    chunks = {"one_f_one_b": 1, "zb_h1": 1, "interleaved": 3, "zb_v": 2, "folded": 2, "stp": 2}
    with nccl_group():
        for name, count in chunks.items():
            total = count * dist.get_world_size()
            mine, twins = ([each.cuda() for each in mlps(total)] for _ in "12")
            own = own_stages(mine, name)
            batch = tuple(x.cuda() for x in data(MICRO_BATCHES))
            right_step(made(name, own, MICRO_BATCHES), own, twins, batch, MICRO_BATCHES)
    return []


def their_runtime() -> list[str]:
    """A rank: raises unless PyTorch's own DualPipeV has the same bits with two strands."""
    from overlap_models import blocks, stages_of
    from stage_models import data, loss_of
    from test_overlap_custom import COUNT, in_three_ways, made_up
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    with nccl_group(), mock.patch("interlace.pipelining.overlap_step.stage_costs", made_up):
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("pp", "tp"))

        def make() -> ScheduleDualPipeV:
            stages = stages_of([each.cuda() for each in blocks(mesh)], mesh)
            return ScheduleDualPipeV(stages, COUNT, loss_of)

        batches = [tuple(x.cuda() for x in data(COUNT, seed)) for seed in range(3)]
        overlap = in_three_ways(make, batches, mesh=mesh)
        return [] if overlap.turns else ["nothing was interleaved"]


def one_communicator() -> list[str]:
    """A rank: the same where all sends and receives of a rank share a stream."""
    return every_schedule(one_communicator=True)


def ended(how: str) -> list[str]:
    """A rank: rank 1 is paused, or raises, in the middle of the second step, and rank 0 says so."""
    from test_pipeline_step import QUICK, built, language, loss_of

    with nccl_group():
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("pp",))
        batches = [tuple(x.cuda() for x in batch) for batch in language(MICRO_BATCHES)]
        step = interlace.compile_step(
            built().cuda(), loss_of, batches[0], mesh=mesh, schedule="one_f_one_b", config=QUICK,
            wait_s=WAIT_S,
        )  # fmt: skip
        step(batches)
        pids: list[int] = [0, 0]
        dist.all_gather_object(pids, os.getpid())
        run = StepRun.action

        def action(self: StepRun, each: Action) -> None:
            if dist.get_rank() == 1 and str(each) == "backward_1 2":
                if how == "raises":
                    raise ValueError("the user's own")
                os.kill(os.getpid(), signal.SIGSTOP)
                os._exit(0)
            run(self, each)

        StepRun.action = action  # type: ignore[method-assign]
        start, said = time.monotonic(), "no error"
        try:
            step(batches)
        except (RunError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start
        print(f"rank {dist.get_rank()} after {seconds:.1f} s: {said}", flush=True)
        if dist.get_rank() == 1:
            time.sleep(WAIT_S)  # its connections live on until rank 0 has said that
            os._exit(not said.startswith("ValueError"))
        os.kill(pids[1], signal.SIGCONT)
        wanted = ["Unended: receive ", "rank 1 makes it in its action "]
        if how == "raises":
            wanted.append("rank 1 said first: ValueError: the user's own")
        wrong = [each for each in wanted if each not in said]
        print("\n".join(wrong), flush=True)
        os._exit(bool(wrong) or seconds > 2 * WAIT_S)


def paused() -> list[str]:
    """A rank."""
    return ended("paused")


def raises() -> list[str]:
    """A rank."""
    return ended("raises")


def gloo() -> list[str]:
    """A rank: what another rank's GPU memory would be read as is refused."""
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("pp",))
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()

    def square(module: nn.Module, x: Tensor) -> Tensor:
        return module(x).square().mean()

    try:
        example = (torch.ones(2, 8, device="cuda"),)
        interlace.compile_step(module, square, example, mesh=mesh, schedule="one_f_one_b")
    except InputError as error:
        return [] if "gloo is to send" in str(error) else [str(error)]
    finally:
        dist.destroy_process_group()
    return ["nothing was refused"]


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
@unittest.skipIf(bool(LACKING), f"not installed: {', '.join(LACKING)}")
class PipelinesOnCuda(unittest.TestCase):
    """Ranks of NCCL, as torchrun starts them."""

    def test_every_schedule_over_two_ranks(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "every_schedule", 2, LIMIT_S)

    def test_every_schedule_over_four_ranks(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "every_schedule", 4, LIMIT_S)

    def test_ours_behind_pytorchs_interface(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "their_interface", 2, LIMIT_S)

    @unittest.skipUnless(HAS_RUNTIME, f"install_overlap is refused with torch {torch.__version__}")
    def test_pytorchs_runtime_with_two_strands(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "their_runtime", 4, LIMIT_S)

    def test_one_communicator(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "one_communicator", 4, LIMIT_S)

    def test_a_paused_rank_is_named(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "paused", 2, LIMIT_S)

    def test_a_rank_that_raises_ends_the_step_on_all(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "raises", 2, LIMIT_S)

    def test_gloo_is_refused(self) -> None:
        nccl_ranks.run_ranks(self, __file__, "gloo", 2, LIMIT_S)


if __name__ == "__main__":
    plain = every_schedule, one_communicator, their_interface, their_runtime
    children = *plain, paused, raises, gloo
    nccl_ranks.main({each.__name__: each for each in children})
