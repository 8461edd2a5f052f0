"""Pipelines beside tensor parallelism and replicas, over several steps of training, cut where the
user says; and what is refused, or ends with a name.

Wide are four stages of two ranks, beside two stages of two and, in `test_pipeline_step.py`, four of
one.
"""

import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks, start_ranks
from test_compile_step import (
    QUICK,
    eager_gradients,
    example,
    gradients_of,
    images,
    mixer,
    near,
)
from test_pipeline_step import SCHEDULES, built, differing, language, loss_of, wanted
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from traced_once import traced_once

import interlace
from interlace.errors import InputError, InterlaceError
from interlace.parallel.local_parts import local
from interlace.report.pipeline_picture import pipeline_png
from interlace.schedules.finder import find
from interlace.sim.pipeline_step import ACTION
from wide import WIDE

BESIDE_TENSOR = ("one_f_one_b", "folded", "zb_v", "interleaved", "stp", "eager_folded")
BESIDE_REPLICAS = (
    "dual_pipe_v", "gpipe", "eager_one_f_one_b", "zb_h1", "zb_h2", "one_f_one_b",
)  # fmt: skip
"""All schedules between them; by all at once `test_stage_layouts` has a stage of both kinds."""
BLOCKS = ("blocks.2", "blocks.4", "blocks.7")
STEPS = 4


def beside_tensor_parallelism() -> dict[str, list[str]]:
    """By schedule: what differs from one strand with tensor parallelism alone."""
    with gloo_group(60), traced_once():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        model = mixer()
        example().split(model, mesh["tp"])
        step = interlace.compile_step(
            model, example().loss_fn, images()[0], mesh=mesh["tp"], strands=1, config=QUICK
        )
        right = {"loss": step(images()), **gradients_of(model)}
        found = {}
        for schedule in BESIDE_TENSOR:
            model = mixer()
            example().split(model, mesh["tp"])
            step = interlace.compile_step(
                model, example().loss_fn, images()[0], mesh=mesh, schedule=schedule, config=QUICK
            )
            own = {"loss": step(images())}
            own |= {
                name: p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                for name, p in model.named_parameters()
                if p.grad is not None
            }
            found[schedule] = [n for n, v in own.items() if not torch.equal(v, right[n])]
            norm = interlace.clip_grad_norm_(step, 0.1)
            exact = torch.nn.utils.get_total_norm(list(eager_gradients().values()))
            if abs(norm / exact - 1) > 1e-9:
                found[schedule].append(f"norm {norm} and not {exact}")
            found[f"{schedule} own"] = sorted(set(own) - {"loss"})
        return {**found, "all": sorted(set(right) - {"loss"})}


def test_stages_of_several_ranks() -> None:
    """Two stages of two tensor-parallel ranks each, bit for bit as two ranks without stages."""
    found = [r.value for r in run_ranks("test_pipeline_models:beside_tensor_parallelism", 4,
                                        timeout_s=200)]  # fmt: skip
    for schedule in BESIDE_TENSOR:
        assert [each[schedule] for each in found] == [[]] * 4
        assert sorted({n for each in found for n in each[f"{schedule} own"]}) == found[0]["all"]


def four_stages_of_two() -> dict[str, Any]:
    """The same with some layers that end in all-gathers, and dropout."""
    with gloo_group(120), traced_once():
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("pp", "tp"))

        def split() -> nn.Module:
            module = built()
            plan = {f"blocks.{i}": ColwiseParallel(output_layouts=Replicate()) for i in (1, 4, 7)}
            return parallelize_module(module, mesh["tp"], plan)

        batches, found = language(4), {}
        right = parts(split(), batches, mesh=mesh["tp"], strands=1)
        for schedule in ("zb_v", "folded"):
            own = parts(split(), batches, mesh=mesh, schedule=schedule)
            found[schedule] = [n for n, v in own.items() if not torch.equal(v, right[n])]
            found[f"{schedule} own"] = sorted(own)
        return {**found, "all": sorted(right)}


def parts(
    module: nn.Module, batches: list[tuple[Tensor, ...]], **options: Any
) -> dict[str, Tensor]:
    """Losses, and this rank's parts of gradients."""
    torch.manual_seed(11)
    step = interlace.compile_step(module, loss_of, batches[0], config=QUICK, **options)
    step(batches)
    held = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(step.losses)} | {n: local(p).clone() for n, p in held.items()}


@WIDE
def test_four_stages_of_two_ranks() -> None:
    """Eight chunks of a layer or two, bit for bit as two ranks without stages."""
    found = [r.value for r in run_ranks("test_pipeline_models:four_stages_of_two", 8,
                                        timeout_s=200)]  # fmt: skip
    for schedule in ("zb_v", "folded"):
        assert [each[schedule] for each in found] == [[]] * 8
        assert sorted({n for each in found for n in each[f"{schedule} own"]}) == found[0]["all"]


def beside_replicas() -> dict[str, Any]:
    """By schedule: what differs from one strand whose replicas see the same micro-batches."""
    with gloo_group(60), traced_once():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))
        batches = language(4, seed=mesh.get_local_rank("dp_replicate"))
        module = built()
        torch.manual_seed(11)
        step = interlace.compile_step(
            module, loss_of, batches[0], mesh=mesh["dp_replicate"], strands=1, config=QUICK
        )
        step(batches)
        evaluated = step.evaluate(batches)
        right = {**gradients_of(module), "losses": torch.stack(step.losses)}
        found: dict[str, Any] = {"all": sorted(set(right) - {"losses"})}
        right["evaluated"] = evaluated
        for schedule in BESIDE_REPLICAS:
            found[schedule] = differing(built, batches, mesh, schedule, right)
        return found


def test_stages_with_replicas() -> None:
    """Two replicas of two stages, which draw other masks for other data, bit for bit."""
    assert {*BESIDE_TENSOR, *BESIDE_REPLICAS} == set(SCHEDULES)
    found = [r.value for r in run_ranks("test_pipeline_models:beside_replicas", 4, timeout_s=200)]
    for schedule in BESIDE_REPLICAS:
        assert [each[schedule]["wrong"] for each in found] == [[]] * 4
        held = {name for each in found for name in each[schedule]["own"]}
        assert sorted(held) == found[0]["all"]


def trained(
    make: Callable[[], nn.Module], step_of: Callable[[nn.Module], Any], parameters: set[str]
) -> dict[str, Tensor]:
    """Losses and weights after some steps of AdamW on some parameters, or on all."""
    module = make()
    step = step_of(module)
    named = dict(module.named_parameters())
    chosen = {name: p for name, p in named.items() if not parameters or name in parameters}
    optimizer = torch.optim.AdamW(chosen.values(), lr=0.05)
    found = {}
    for number in range(STEPS):
        found[f"loss {number}"] = step(language(3 + number, seed=number))
        optimizer.step()
        optimizer.zero_grad()
    return {**found, **{name: p.detach() for name, p in chosen.items()}}


def several_steps() -> dict[str, Any]:
    """What differs after steps of 3 to 6 micro-batches, from one strand on one rank."""
    with gloo_group(60), traced_once():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

        def alone(module: nn.Module) -> Any:
            torch.manual_seed(11)
            return interlace.compile_step(module, loss_of, language(1)[0], strands=1, config=QUICK)

        steps = []

        def staged(module: nn.Module) -> Any:
            torch.manual_seed(11)
            step = interlace.compile_step(
                module, loss_of, language(1)[0], mesh=mesh, schedule="dual_pipe_v",
                split_at=BLOCKS, config=QUICK,
            )  # fmt: skip
            steps.append(step)
            return step

        right = trained(built, alone, set())
        try:
            alone(built()).record_pipeline(language(2))
            refusal = ""
        except InputError as error:
            refusal = error.message
        probe = built()
        step = staged(probe)
        record = step.record_pipeline(language(6))
        picture = pipeline_png(record.actions, record.measured, title="measured")
        recorded = [
            [span.name for span in timeline.spans if span.kind == ACTION]
            for timeline in record.measured.timelines
        ]
        in_order = all(
            one.end_ns <= other.start_ns
            for timeline in record.measured.timelines
            for one, other in pairwise(timeline.spans)
        )
        held = {name for name, p in probe.named_parameters() if p.grad is not None}
        freed = []

        def staged_alone(module: nn.Module) -> Any:
            step = staged(module)
            freed.append(interlace.free_other_stages(step))
            return step

        found = trained(built, staged_alone, held)
        steps[-1].check_ranks()
        with torch.no_grad():
            evaluated = steps[-1].evaluate(language(2))
        others = sum(p.nbytes for name, p in probe.named_parameters() if name not in held)
        return {
            "different": [name for name in found if not torch.equal(found[name], right[name])],
            "held": sorted(held),
            "freed": freed == [others] and bool(evaluated > 0),
            "stage": sorted(interlace.stage_parameters(steps[-1])),
            "refusal": refusal,
            "recorded": recorded == [[str(a) for a in own] for own in record.actions] and in_order,
            "actions": len(recorded[0]),
            "picture": picture.startswith(b"\x89PNG"),
            "times": min(record.predicted.step_ns, *record.costs.messages_ns.values()) > 0,
            "around": min(*record.costs.before_ns, record.costs.behind_ns) > 0,
            "kept": min(record.predicted.peak_bytes) > 0,
            "edges": sorted(record.costs.messages_ns),
            "summary": record.summary().count("bubble"),
            "losses": sum(name.startswith("loss") for name in found),
        }


def test_several_steps_of_training() -> None:
    """Weights of each rank's stage, of which a tied one stays equal on both, and all losses; cut at
    named sub-modules. A step before them is recorded on both ranks."""
    first, last = (r.value for r in run_ranks("test_pipeline_models:several_steps", 2,
                                              timeout_s=200))  # fmt: skip
    for found in (first, last):
        assert found["different"] == []
        assert found["losses"] == STEPS
        assert found["recorded"]
        assert found["freed"]
        assert found["stage"] == found["held"]
        assert found["picture"]
        assert found["times"]
        assert found["around"]
        assert found["kept"]
        wanted_actions = find("dual_pipe_v").of_ranks(2, 6)[0]
        assert (found["actions"], found["summary"]) == (len(wanted_actions), 2)
        assert found["edges"] == [[0, 1], [2, 3]]
        assert "none of a pipeline" in found["refusal"]
    blocks = [[n for n in each["held"] if n.endswith("weight") and "blocks" in n]
              for each in (first, last)]  # fmt: skip
    assert blocks[0] == [f"blocks.{i}.weight" for i in (0, 1, 7, 8)]
    assert blocks[1] == [f"blocks.{i}.weight" for i in (2, 3, 4, 5, 6)]
    assert "words.weight" in first["held"]


def refused() -> list[str]:
    """What a user reads."""
    with gloo_group(60):
        pipe = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
        both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
        found = []

        def tried(mesh: DeviceMesh, **how: Any) -> None:
            try:
                module = how.pop("module", None) or built()
                interlace.compile_step(
                    module, how.pop("loss", loss_of), how.pop("batch", language(1)[0]), mesh=mesh,
                    config=QUICK, **how,
                )  # fmt: skip
                found.append("nothing")
            except InputError as error:
                found.append(f"{error.message} | {error.hint}")

        tried(pipe)
        tried(pipe, schedule="one_f_one_b", split_at=("blocks.2", "blocks.4"))
        tried(pipe, schedule="one_f_one_b", split_at=("block.2",))
        tried(pipe, schedule="folded", split_at=("blocks.4", "blocks.2", "blocks.6"))
        tried(pipe, schedule="two_strand")
        tried(both, schedule="two_strand", split_at=("blocks.2",))
        tried(pipe, schedule="folded", module=nn.Linear(2, 1, bias=False),
              loss=lambda m, x: m(x).sum(), batch=(torch.ones(1, 2),))  # fmt: skip
        return found


def test_what_cannot_run_is_refused() -> None:
    """With the numbers, on both ranks alike."""
    first, last = (r.value for r in run_ranks("test_pipeline_models:refused", 2, timeout_s=100))
    assert first == last
    for text, wanted_text in zip(
        first,
        (
            "an axis pp of 2 ranks, and no schedule is named",
            "split_at names 2 sub-modules, and the schedule has 2 chunks | .*name 1",
            "split_at names 'block.2', and no operator of the forward belongs to it | did you mean",
            "split_at names 'blocks.2', whose first operator does not come behind 'blocks.4'",
            "two_strand",
            "schedule 'two_strand' has one chunk",
            "too few for 4 chunks",
        ),
        strict=True,
    ):
        for piece in wanted_text.split(" | .*"):
            assert piece in text


def disagreeing() -> list[str]:
    """What this rank is told where ranks were given different schedules, or in the second step
    different numbers of micro-batches."""
    with gloo_group(60), traced_once():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
        rank, found = dist.get_rank(), []

        def compiled(schedule: str) -> Any:
            return interlace.compile_step(
                built(), loss_of, language(1)[0], mesh=mesh, schedule=schedule, config=QUICK
            )

        for other in ("gpipe", "zb_v"):
            try:
                compiled("one_f_one_b" if rank != 1 else other)
                found.append("nothing")
            except InterlaceError as error:
                found.append(error.message)
        step = compiled("gpipe")
        step(language(3))
        began = time.monotonic()
        try:
            step(language(3 if rank != 1 else 4))
            found.append("nothing")
        except InterlaceError as error:
            found.append(error.message)
        assert time.monotonic() - began < 20
        return found


def test_ranks_that_disagree_are_named() -> None:
    """On all ranks, long before anything is waited for in vain."""
    results = [r.value for r in run_ranks("test_pipeline_models:disagreeing", 3, timeout_s=100)]
    for one, two, count in results:
        for text in (one, two):
            assert "rank 1" in text, results
        assert "ranks have different micro-batches at one step: " in count, results
        assert "rank 1: 4 micro-batches" in count, results


def killed() -> None:
    """A child: rank 1 stops in the second step, and the others say what they wait for."""
    with gloo_group(20):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
        step = interlace.compile_step(
            built(), loss_of, language(1)[0], mesh=mesh, schedule="one_f_one_b", config=QUICK
        )
        step(language(3))
        dist.barrier()
        print("ready", flush=True)
        if mesh.get_rank() == 1:
            time.sleep(60)
        try:
            step(language(3))
        except InterlaceError as error:
            print(f"{type(error).__name__}: {error.message}", flush=True)


def test_a_killed_rank_is_named() -> None:
    """The ranks beside it say which message did not come, and nobody hangs."""
    with start_ranks("test_pipeline_models:killed", 3, timeout_s=100) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "ready")
        os.kill(ranks.pid(1), signal.SIGKILL)
        killed_at = time.monotonic()
        first, last = ranks.wait([0, 2])
        assert max(first.ended_at, last.ended_at) - killed_at < 30
        assert "Unended: receive backward_1>0 1 from rank 1 did not end" in first.stdout
        assert "Unended: receive forward_1>2 1 from rank 1 did not end" in last.stdout


def test_one_strand_is_what_eager_code_computes() -> None:
    """The reference of the bits above, against plain autograd on the same dropout-free module."""
    batches = language(3)
    module = built().double().eval()
    losses = [loss_of(module, *batch) for batch in batches]
    (sum(losses) / 3).backward()  # type: ignore[union-attr]
    right = {name: p.grad for name, p in module.named_parameters()}
    found = wanted(lambda: built().double().eval(), batches)
    assert near({name: found[name] for name in right}, right)
    mean = torch.stack(losses).mean()
    assert abs(found["evaluated"] / mean - 1) < 1e-12
    dropped = wanted(lambda: built().double(), batches)
    assert abs(dropped["evaluated"] / mean - 1) < 1e-12
    assert abs(dropped["losses"].mean() / mean - 1) > 1e-4
