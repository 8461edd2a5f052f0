"""Stock schedules of PyTorch's, whose OVERLAP_F_B actions run two passes interleaved.

What is right is the same schedule of PyTorch's on the same stages without Interlace. It has to give
the same bits, and so do the same traced graphs one pass after the other.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from overlap_models import (
    STAGES,
    Branching,
    Dropped,
    Masked,
    MixedTypes,
    blocks,
    sharded,
    stages_of,
    weighted_loss,
)
from processes import gloo_group, run_ranks
from stage_models import (
    ROWS,
    Handed,
    call,
    data,
    loss_of,
    mlps,
    own_stages,
    tied,
    word_loss,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import (
    FORWARD,
    OVERLAP_F_B,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
)

from interlace.errors import InputError, PeerError, RunError
from interlace.ir.costs import CostTable, cost_of
from interlace.pipelining import install_overlap, torch_schedule

pytestmark = pytest.mark.skipif(
    torch.__version__ >= (2, 15), reason="install_overlap is refused from torch 2.15 on"
)
COUNT = 6
"""Micro-batches of a step."""


def made_up(stages: Any, *_: Any) -> CostTable:
    """In place of measured times: every operator takes 10 us and every collective 40."""
    operators = {
        op.key: cost_of(op, 40_000 if op.is_collective else 10_000)
        for stage in stages
        for graph in stage.strands.op_graphs.values()
        for op in graph.operators
    }
    return CostTable(operators=operators, source="by hand")


def parameters(own: list[PipelineStage]) -> list[nn.Parameter]:
    every = (p for stage in own for p in stage.submod.parameters() if p.requires_grad)
    return list(dict.fromkeys(every))


def trained(
    schedule: Any, batches: list[Any], run: Callable[..., Any] = call, *, keep: bool = False
) -> list[Tensor]:
    """Losses, outputs and gradients of some steps; with `keep` gradients are not set to zero."""
    own = schedule._stages
    optimizer = torch.optim.SGD(parameters(own), lr=0.1)
    found: list[Tensor] = []
    for batch in batches:
        output, losses = run(schedule, batch)
        found += [each.detach().clone() for each in losses]
        found += [] if output is None else [output.detach().clone()]
        for parameter in parameters(own):
            assert parameter.grad is not None
            found.append(parameter.grad.clone())
        optimizer.step()
        if not keep:
            optimizer.zero_grad()
    return found


def in_three_ways(
    make: Callable[[], Any], batches: list[Any], *, mesh: DeviceMesh | None = None, **options: Any
) -> Any:
    """Steps of PyTorch's schedule, of its traced graphs one after the other, and interleaved; what
    `install_overlap` gave for the last."""
    plain = trained(make(), batches, **options)
    found = []
    for strands in (1, 2):
        schedule = make()
        overlap = install_overlap(schedule, mesh=mesh, strands=strands, profile_repeats=1)
        with pytest.raises(RunError, match="nothing has been traced"):
            _ = overlap.turns
        found.append(trained(schedule, batches, **options))
    one, two = found
    assert len(one) == len(two) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(two, plain, strict=True))
    return overlap


def interleaved(tensor_ranks: int) -> Any:
    """Stages with collectives: same bits, and operators of both passes take turns."""
    with gloo_group(60), mock.patch("interlace.pipelining.overlap_step.stage_costs", made_up):
        shape = (dist.get_world_size() // tensor_ranks, tensor_ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "tp"))

        def make() -> Any:
            return ScheduleDualPipeV(stages_of(blocks(mesh), mesh), COUNT, loss_of)

        batches = [data(COUNT, seed) for seed in range(4)]
        overlap = in_three_ways(make, batches, mesh=mesh)
        actions = overlap._schedule.pipeline_order_with_comms[mesh.get_local_rank("pp")]
        wanted = sum(action.computation_type == OVERLAP_F_B for action in actions)
        assert sum(n for phase, n in overlap.counts.items() if "+" in phase) == wanted > 0
        schedule = overlap._schedule
        overlap.record()
        call(schedule, batches[0])
        assert overlap.timeline is not None
        spans = sorted(overlap.timeline.spans, key=lambda span: span.start_ns)
        return overlap.turns, [(span.strand, span.micro_batch, span.lane) for span in spans]


@pytest.mark.parametrize(("ranks", "tensor_ranks"), [(2, 1), (4, 2)])
def test_passes_interleave(ranks: int, tensor_ranks: int) -> None:
    """A stock ScheduleDualPipeV of 4 stages, several steps: the bits of PyTorch alone and of one
    pass after the other; the plan takes turns, and so does what ran."""
    results = run_ranks("test_overlap_custom:interleaved", ranks, args=[tensor_ranks], timeout_s=90)
    for result in results:
        turns, spans = result.value
        assert len(turns) == 2
        assert all(count >= 4 for count in turns.values())
        computed = [(strand, number) for strand, number, lane in spans if lane == "compute"]
        changes = sum(a != b for a, b in pairwise(computed))
        assert changes > 40


def stage_kinds() -> None:
    """What stages may be like: plain ones, integers and a tied weight, a mask that is handed on."""
    with gloo_group(60):
        batches = [data(COUNT, seed) for seed in range(3)]

        def make() -> Any:
            return ScheduleDualPipeV(own_stages(mlps(STAGES), "dual_pipe_v"), COUNT, loss_of)

        in_three_ways(make, batches)
        in_three_ways(make, batches, keep=True)

        def summing() -> Any:
            own = own_stages(mlps(STAGES), "folded")
            return torch_schedule(own, COUNT, loss_of, schedule="folded", scale_grads=False)

        in_three_ways(summing, batches)

        def words() -> Any:
            return ScheduleDualPipeV(own_stages(tied(), "dual_pipe_v"), COUNT, word_loss)

        in_three_ways(words, [word_batch(seed) for seed in range(2)])

        def masked() -> Any:
            torch.manual_seed(8)
            modules = [Handed(), Handed(), Handed(), Masked()]
            return ScheduleDualPipeV(own_stages(modules, "dual_pipe_v"), COUNT, weighted_loss)

        in_three_ways(masked, batches[:2], run=call_masked)


def word_batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (ROWS * COUNT,), generator=draw)
    return tokens, tokens.roll(1)


def call_masked(schedule: Any, batch: Any) -> Any:
    """With a mask beside the batch, and arguments of the loss."""
    losses: list[Tensor] = []
    own = schedule._stages
    args = (batch[0], batch[0][:, 0] > 0) if own[0].is_first else ()
    named = {"weight": batch[1].mean().abs(), "power": 2.0}
    given: dict[str, Any] = {}
    if own[0].is_first:
        given = {"target": batch[1], "losses": losses, "loss_kwargs": named}
    output = schedule.step(*args, return_outputs=False, **given)
    assert output is None
    return output, losses


def test_stages() -> None:
    """Several kinds, each over several steps."""
    run_ranks("test_overlap_custom:stage_kinds", 2, timeout_s=90)


def dropout_and_eval() -> None:
    """Masks do not depend on the order, and differ from step to step and from stage to stage. An
    evaluation is PyTorch's forward, before and between steps."""
    with gloo_group(60):
        found, evaluated = [], []
        for strands in (1, 2):
            torch.manual_seed(9)
            own = own_stages([Dropped() for _ in range(STAGES)], "dual_pipe_v")
            schedule = ScheduleDualPipeV(own, COUNT, loss_of)
            install_overlap(schedule, strands=strands, profile_repeats=1)
            kept = []
            for _ in range(2):
                for stage in own:
                    stage.submod.eval()
                with torch.no_grad():
                    output, losses = call(schedule, data(COUNT), "eval")
                for stage in own:
                    stage.submod.train()
                kept.append((output, losses))
                found.append(trained(schedule, [data(COUNT)]))
            evaluated.append(kept)
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found[1], found[3], strict=True))
        for (output, losses), (other, others) in zip(*evaluated, strict=True):
            assert (output is None) == (not losses)
            if output is not None:
                assert torch.equal(output, other)
                assert torch.equal(torch.stack(losses), torch.stack(others))


def test_dropout_and_evaluation() -> None:
    """With steps between evaluations."""
    run_ranks("test_overlap_custom:dropout_and_eval", 2, timeout_s=60)


def refusals() -> None:
    """Each by name, on all ranks, and the schedule is as it was."""
    with gloo_group(60):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))

        def refuse(modules: list[nn.Module], match: str, *, first_step: bool = False) -> None:
            own = own_stages(modules, "dual_pipe_v")
            schedule = ScheduleDualPipeV(own, COUNT, loss_of)
            if first_step:
                install_overlap(schedule)
            with pytest.raises((InputError, PeerError), match=match):
                call(schedule, data(COUNT)) if first_step else install_overlap(schedule)
            assert all(p.grad is None for p in parameters(own))

        refuse([*mlps(3), sharded(mesh["dp"])], "stage 3: 'weight' is a DTensor")
        refuse(
            [fully_shard(mlps(1)[0], mesh=mesh["dp"]), *mlps(3)],
            "stage 0: the module is under fully_shard",
        )
        refuse(
            [*mlps(2), Branching(), *mlps(1)],
            r"stage 2 \(Branching\) cannot be traced",
            first_step=True,
        )
        refuse(
            [*mlps(2), MixedTypes(), *mlps(1)],
            r"stage 2 \(MixedTypes\): it has trainable parameters of 2 types",
            first_step=True,
        )
        own = own_stages(mlps(STAGES), "dual_pipe_v")
        with pytest.raises(InputError, match="runs no two passes in one action"):
            install_overlap(ScheduleZBVZeroBubble(own, COUNT, loss_of))
        with pytest.raises(InputError, match=r"Schedule1F1B of torch .* has no register_custom"):
            install_overlap(Schedule1F1B(own_stages(mlps(2), "gpipe")[0], COUNT, loss_of))
        schedule = ScheduleDualPipeV(own, COUNT, loss_of)
        with pytest.raises(InputError, match="strands = 3"):
            install_overlap(schedule, strands=3)
        with pytest.raises(InputError, match="unknown search 'marge'"):
            install_overlap(schedule, search="marge")
        own[1].dw_builder = lambda: None
        with pytest.raises(InputError, match="has a dw_builder"):
            install_overlap(schedule)
        own[1].dw_builder = None
        for parameter in own[0].submod.parameters():
            parameter.register_hook(lambda grad: grad)
        with pytest.raises(InputError, match=r"stage . \(Mlp\): parameter .* has a gradient hook"):
            call(hooked(own), data(COUNT))
        replicas = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
        with pytest.raises(InputError, match="mesh has the axis dp_replicate of 2 ranks"):
            install_overlap(schedule, mesh=replicas)
        schedule.register_custom_function(FORWARD, lambda *_: None)
        with pytest.raises(InputError, match="custom function for FORWARD already"):
            install_overlap(schedule)
        changed()


def hooked(own: list[Any]) -> Any:
    schedule = ScheduleDualPipeV(own, COUNT, loss_of)
    install_overlap(schedule)
    return schedule


def changed() -> None:
    """Other micro-batches than those of the trace are refused, and so is a module that changed."""
    own = own_stages(mlps(STAGES), "dual_pipe_v")
    schedule = ScheduleDualPipeV(own, COUNT, loss_of)
    install_overlap(schedule, profile_repeats=1)
    call(schedule, data(COUNT))
    own[0].submod.eval()
    with pytest.raises(RunError, match="eval mode"):
        call(schedule, data(COUNT))


def test_refusals() -> None:
    """Before a step, or in the first one before anything runs."""
    run_ranks("test_overlap_custom:refusals", 2, timeout_s=60)
