"""Interlace behind PyTorch's pipeline interface, in the scenarios of PyTorch's own tests.

What is right is computed in each rank by plain eager code, and compared by PyTorch's tolerances;
where Interlace promises bits, by bits.
"""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from stage_models import (
    ROWS,
    WORDS,
    Handed,
    Named,
    call,
    close,
    compare,
    data,
    eager,
    in_order,
    loss_of,
    mlps,
    own_stages,
    pairs,
    tied,
    word_loss,
)
from test_pipelining_orders import one_at_a_time
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError, RunError
from interlace.pipelining import PipelineSchedule

QUICK = PlanConfig(cluster="h100", search="list")
COUNT = 4
"""Micro-batches of most tests."""


def made(
    schedule: Any, stages: Any, count: int = COUNT, loss: Any = loss_of, **options: Any
) -> Any:
    return PipelineSchedule(stages, count, loss, schedule=schedule, config=QUICK, **options)


def right_step(
    schedule: Any, own: list[PipelineStage], twins: list[nn.Module], batch: Any, count: int
) -> None:
    """A step of ours, and the same by eager code."""
    losses, outputs = eager(in_order(twins), loss_of, pairs(batch, count))
    found, found_losses = call(schedule, batch)
    assert compare(own, twins) == 4 * len(own)
    if own[-1].is_last:
        close(found, torch.cat(outputs))
        close(torch.stack(found_losses), torch.stack(losses))
        assert not found.requires_grad
    else:
        assert found is None
        assert found_losses == []


def every_schedule(count: int, names: dict[str, int]) -> None:
    """Output, losses and gradients by each schedule, with so many stages on a rank."""
    with gloo_group(60):
        for name, chunks in names.items():
            schedule: Any = one_at_a_time if name == "a user's own" else name
            total = chunks * dist.get_world_size()
            own = own_stages(mlps(total), schedule)
            right_step(made(schedule, own, count), own, mlps(total), data(count), count)


@pytest.mark.parametrize(
    ("ranks", "count", "names"),
    [
        (1, 3, {"gpipe": 1, "folded": 2}),
        (
            2,
            5,
            {
                "one_f_one_b": 1,
                "interleaved": 3,
                "zb_h1": 1,
                "stp": 2,
                "folded": 2,
                "a user's own": 2,
            },
        ),
        (4, 8, {"gpipe": 1, "zb_v": 2, "dual_pipe_v": 2}),
    ],
)
def test_schedules(ranks: int, count: int, names: dict[str, int]) -> None:
    """One stage on a rank, several, V shapes, backwards in halves, two strands at a time, and a
    user's own function."""
    run_ranks("test_pipelining:every_schedule", ranks, args=[count, names], timeout_s=100)


def forward_only() -> None:
    """Without a loss: outputs of several calls, under inference_mode too, and no gradient."""
    with gloo_group(60):
        modules, twins = mlps(2), in_order(mlps(2))
        own = own_stages(modules, "gpipe")
        schedule = made("gpipe", own, loss=None)
        for seed in range(3):
            batch = data(COUNT, seed)
            with torch.inference_mode(seed == 1):
                args = (batch[0],) if own[0].is_first else ()
                found = schedule.eval(*args) if seed == 2 else schedule.step(*args)
            if own[-1].is_last:
                close(found, twins(batch[0]))
        assert all(p.grad is None for p in own[0].submod.parameters())


def eval_and_train() -> None:
    """An evaluation first, a step, an evaluation again: it leaves gradients and weights alone. The
    stages of other ranks have no memory, and tensors do not pile up from step to step."""
    with gloo_group(60):
        twins, own = mlps(4), own_stages(mlps(4), "dual_pipe_v")
        schedule, batch = made("dual_pipe_v", own), data(COUNT)
        right = [loss_of(in_order(twins)(x), y) for x, y in pairs(batch, COUNT)]
        for method in ("eval", "step", "eval"):
            with torch.inference_mode(method == "eval"):
                if method == "step":
                    right_step(schedule, own, twins, batch, COUNT)
                    continue
                output, losses = call(schedule, batch, "eval")
            assert [stage.has_backward for stage in own] == [False, False]
            if own[-1].is_last:
                close(torch.stack(losses), torch.stack(right))
                close(output, in_order(twins)(batch[0]))
        assert compare(own, twins)
        held = {p.data_ptr(): p.nbytes for stage in own for p in stage.submod.parameters()}
        every = schedule.compiled.strands.module.parameters()
        assert sum(p.untyped_storage().nbytes() for p in every) == sum(held.values())
        with torch.no_grad(), pytest.raises(RunError, match="no_grad"):
            call(schedule, batch)
        alive = []
        for _ in range(4):
            call(schedule, batch)
            alive.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
        assert alive[1] == alive[2] == alive[3]


def weights_follow() -> None:
    """Three updates, of gradients of two steps each: the weights of eager code. Without
    `scale_grads` gradients are those of a sum."""
    with gloo_group(60):
        twins, own = mlps(2), own_stages(mlps(2), "one_f_one_b")
        schedule = made("one_f_one_b", own, scale_grads=False)
        ours = torch.optim.SGD(own[0].submod.parameters(), lr=0.02, momentum=0.9)
        theirs = torch.optim.SGD(in_order(twins).parameters(), lr=0.02, momentum=0.9)
        for update in range(3):
            for step in range(2):
                batch = data(COUNT, 10 * update + step)
                eager(in_order(twins), loss_of, pairs(batch, COUNT), mean=False)
                call(schedule, batch)
            compare(own, twins)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        right = dict(twins[own[0].stage_index].named_parameters())
        for name, parameter in own[0].submod.named_parameters():
            close(parameter, right[name])


def arguments() -> None:
    """Several inputs, a mask that stages hand through, arguments by name that differ from rank to
    rank, plain values among them; micro-batches that are cut already; outputs left out."""
    with gloo_group(60):
        torch.manual_seed(1)
        modules, twins = (nn.ModuleList([Handed(), Named()]) for _ in range(2))
        twins.load_state_dict(modules.state_dict())
        rank = dist.get_rank()
        own = [PipelineStage(modules[rank], rank, 2, torch.device("cpu"))]
        x, y = data(COUNT)
        mask = torch.arange(len(x)) % 3 > 0
        scale = torch.rand(len(x), generator=torch.Generator().manual_seed(2))

        def whole(a: Tensor, on: Tensor, by: Tensor) -> Tensor:
            return twins[1](*twins[0](a, on), by=by, add=0.5)

        right = eager(whole, loss_of, pairs((x, mask, scale, y), COUNT))
        schedule = made("one_f_one_b", own)
        args, losses = ((x, mask) if rank == 0 else ()), []
        named: dict[str, Any] = {} if rank == 0 else {"by": scale, "add": 0.5}
        found = schedule.step(*args, target=y, losses=losses, **named)
        compare(own, list(twins))
        if rank == 1:
            close(found, torch.cat(right[1]))
            close(torch.stack(losses), torch.stack(right[0]))
        before = {name: p.grad.clone() for name, p in modules[rank].named_parameters()}
        own[0].submod.zero_grad()
        again = schedule.step(
            arg_mbs=list(zip(x.chunk(COUNT), mask.chunk(COUNT), strict=True)) if args else None,
            kwarg_mbs=[{"by": s, "add": 0.5} for s in scale.chunk(COUNT)] if rank == 1 else None,
            target_mbs=y.chunk(COUNT), return_outputs=False,
        )  # fmt: skip
        assert again is None
        for name, parameter in modules[rank].named_parameters():
            assert torch.equal(parameter.grad, before[name]), name


def tied_ends() -> None:
    """Integers in, a weight that the first and the last stage share, a frozen one, buffers."""
    with gloo_group(60):
        twins, modules = tied(), tied()
        tokens = torch.randint(WORDS, (ROWS * COUNT,), generator=torch.Generator().manual_seed(3))
        batch = tokens, tokens.roll(1)
        losses, outputs = eager(in_order(twins), word_loss, pairs(batch, COUNT))
        own = own_stages(modules, "zb_v")
        found, found_losses = call(made("zb_v", own, loss=word_loss), batch)
        for stage in own:
            right = dict(twins[stage.stage_index].named_parameters())
            for name, parameter in stage.submod.named_parameters():
                gradient = right[name].grad
                assert (parameter.grad is None) == (gradient is None)
                if gradient is not None:
                    close(parameter.grad, gradient)
        if own[-1].is_last:
            close(found, torch.cat(outputs))
            close(torch.stack(found_losses), torch.stack(losses))


def replicas_and_bits() -> None:
    """Two replicas of a pipeline of two ranks: the mean of their gradients; and one replica alone
    has the bits of one strand of the same layers."""
    with gloo_group(60):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))
        group, stage = mesh.get_group("pp"), mesh.get_local_rank("pp")
        twins, modules = mlps(2), mlps(2)
        own = [PipelineStage(modules[stage], stage, 2, torch.device("cpu"), group=group)]
        replicas = [data(COUNT, seed) for seed in range(2)]
        for batch in replicas:
            eager(in_order(twins), loss_of, pairs(batch, COUNT))
        for parameter in in_order(twins).parameters():
            parameter.grad /= 2
        call(made("one_f_one_b", own, mesh=mesh), replicas[mesh.get_local_rank("dp_replicate")])
        compare(own, twins)

        batch, whole = replicas[0], in_order(mlps(2))
        step = interlace.compile_step(
            whole, lambda module, x, y: loss_of(module(x), y), pairs(batch, COUNT)[0], strands=1,
            config=QUICK,
        )  # fmt: skip
        step(pairs(batch, COUNT))
        own[0].submod.zero_grad()
        call(made("zb_h1", own), batch)
        right = dict(whole[stage].named_parameters())
        for name, parameter in own[0].submod.named_parameters():
            assert torch.equal(parameter.grad, right[name].grad), name


def results() -> None:
    """`compile_step` without a pipeline keeps what `loss_fn` gives beside the loss: the output, and
    one that is a view of it, by one strand and by two, in steps and evaluations."""
    module, batches = in_order(mlps(2)), pairs(data(COUNT), COUNT)

    def with_output(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        output = model(x)
        return loss_of(output, y), output, output[:, :2], output

    for strands in (1, 2):
        step = interlace.compile_step(
            module, with_output, batches[0], strands=strands, config=QUICK
        )
        for run in (step, step.evaluate):
            run(batches)
            assert len(step.results) == COUNT
            for (output, part, again), (x, _) in zip(step.results, batches, strict=True):
                right = module(x)
                close(output, right)
                assert torch.equal(part, output[:, :2])
                assert torch.equal(again, output)


def refusals() -> list[str]:
    """What is refused, by all ranks alike."""
    with gloo_group(60):
        modules, rank = mlps(2), dist.get_rank()
        own = own_stages(modules, "gpipe")
        swapped = [PipelineStage(modules[1 - rank], 1 - rank, 2, torch.device("cpu"))]
        found = []
        schedule = made("gpipe", own)
        batch = data(COUNT)

        def local() -> None:
            class Local(nn.Linear):
                pass

            stage = PipelineStage(Local(8, 8), rank, 2, torch.device("cpu"))
            call(made("gpipe", [stage]), batch)

        def no_target() -> None:
            made("gpipe", own).eval(*((batch[0],) if rank == 0 else ()))

        def unequal() -> None:
            call(made("gpipe", own), data(COUNT + 1))

        def other_value() -> None:
            call(schedule, batch, flag=1)

        call(schedule, batch)
        for attempt in (lambda: made("gpipe", swapped), local, no_target, unequal, other_value):
            with pytest.raises((InputError, RunError)) as caught:
                attempt()
            found.append(str(caught.value))
        return found


@pytest.mark.parametrize(
    ("child", "ranks"),
    [("forward_only", 2), ("eval_and_train", 2), ("weights_follow", 2), ("arguments", 2),
     ("tied_ends", 2), ("replicas_and_bits", 4), ("results", 1)],
)  # fmt: skip
def test_scenario(child: str, ranks: int) -> None:
    """As the function of this name says."""
    run_ranks(f"test_pipelining:{child}", ranks, timeout_s=100)


def test_refusals() -> None:
    """With what to change."""
    first, second = (r.value for r in run_ranks("test_pipelining:refusals", 2, timeout_s=100))
    assert "has the stages [1], and schedule 'gpipe' puts [0] there" in first[0]
    assert all("cannot be pickled" in each[1] for each in (first, second))
    assert all("passed no target" in each[2] for each in (first, second))
    assert all("divisible by n_microbatches" in each[3] for each in (first, second))
    assert all("pass the same arguments in every call" in each[4] for each in (first, second))
