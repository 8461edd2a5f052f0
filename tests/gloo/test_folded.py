"""Proves that several chunks on a rank change no bit: `folded`, the front half of one micro-batch's
forward beside the back half of another's backward, against one strand, over 20 steps of training.

Wide is ZeRO-1, whose gathers and reductions are at the ends of a step, beside ZeRO-3, whose are in
its chunks.
"""

from typing import Any

import pytest
import torch
from processes import gloo_group, run_ranks
from strand_world import OPTIMIZER, Case, bits, differences, open_world, train
from test_compile_step import QUICK, example, gradients_of, images, mixer, same
from test_data_parallel import Rank, build_meshes, open_rank, parallel
from torch.distributed.device_mesh import init_device_mesh
from traced_once import traced_once

import interlace
from interlace.errors import InputError
from interlace.ir.actions import Action, backward, forward, strands_of, together
from interlace.ir.plan import PhasePlan, Plan
from interlace.parallel.local_parts import local
from interlace.runtime.chunks import in_chunks, one_rank
from interlace.runtime.traced_strands import Strands
from interlace.schedules.gpipe import gpipe
from interlace.schedules.interleaved import interleaved
from interlace.step import Step
from interlace.train.optimizer import build_optimizer, clip_gradients
from interlace.train.step_runners import planned_step
from orders import random_order
from phases import phase_graphs
from wide import WIDE

STEPS = 20


def fold(strands: Strands, seed: int) -> tuple[Strands, Plan]:
    """Two chunks, and a valid plan that no search would make."""
    halves = in_chunks(strands, one_rank(2))
    graphs = phase_graphs(halves.op_graphs, schedule="folded")
    phases = {name: PhasePlan(random_order(graph, seed), 0, 0) for name, graph in graphs.items()}
    return halves, Plan("random", halves.digest, "-", "folded", phases)


def tensor_parallel() -> dict[str, Any]:
    """What differs between one strand and folded, over 20 steps; and how graphs were cut."""
    with gloo_group():
        world = open_world(Case(tied_head=True), 2)
        one = train(world, world.runner(), STEPS)
        halves, plan = fold(world.strands, 3)
        runner = planned_step(world.weights, halves, plan, world.constants)
        found = differences(one, train(world, runner, STEPS))
        evaluated = [
            torch.stack(executor.evaluate(world.case.batches(99))).tolist()
            for executor in (runner.executor, world.runner().executor)
        ]
        left = (len(halves.parts[name].operators) for name in ("forward_0", "forward_1"))
        return {
            "different": found,
            "steps": len(one),
            "names": len(one[0]),
            "evaluated": evaluated[0] == evaluated[1],
            "chunks": all(left),
            "both": [name for name in runner.executor.lowered if len(strands_of(name)) == 2],
        }


def sharded(layout: str) -> list[str]:
    """Steps and names whose bits differ over 20 steps."""
    with gloo_group():
        meshes = build_meshes(parallel(layout), "cpu")
        rank = open_rank(layout, "llama", meshes, dict(meshes.axis_of_group))
        start = {name: local(p).clone() for name, p in rank.weights.masters.items()}
        seen = []
        for strands, plan in (
            (rank.strands, rank.strands.sequential), fold(rank.strands, 5)
        ):  # fmt: skip
            for name, master in rank.weights.masters.items():
                local(master).copy_(start[name])
            rank.weights.publish()
            runner = planned_step(rank.weights, strands, plan, rank.constants)
            seen.append(trained(rank, runner))
        return differences(*seen)


def trained(rank: Rank, runner: Step) -> list[dict[str, str]]:
    """Bits of losses, gradients and weights after each step."""
    optimizer = build_optimizer(rank.weights.parameters, OPTIMIZER)
    steps = []
    for _ in range(STEPS):
        runner(rank.batches)
        clip_gradients(rank.weights.parameters, OPTIMIZER.clip_norm)
        optimizer.step()
        rank.weights.publish()
        now = {f"loss {i}": bits(loss.reshape(1)) for i, loss in enumerate(runner.losses)}
        for name, master in rank.weights.masters.items():
            now[f"weight {name}"] = bits(master)
            now[f"gradient {name}"] = bits(master.grad)
        steps.append(now)
    return steps


def all_forwards_first(
    ranks: int, micro_batches: int, chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """A user's own schedule, in the user's own file."""
    numbers = range(1, micro_batches + 1)
    return ((*(together(forward(i)) for i in numbers), *(together(backward(i)) for i in numbers)),)


def compiled() -> dict[str, Any]:
    """A user's module by each schedule: same losses and gradients, and what was refused."""
    with gloo_group(), traced_once():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        seen, refused = {}, ""
        for schedule in ("one_strand", "two_strand", "folded", all_forwards_first):
            model = mixer()
            example().split(model, mesh)
            batch = images()[0]
            step = interlace.compile_step(
                model, example().loss_fn, batch, mesh=mesh, schedule=schedule, config=QUICK
            )
            loss = step(images())
            seen[step.plan.schedule] = ({**gradients_of(model), "loss": loss}, len(step.actions(4)))
        try:
            interlace.compile_step(
                model, example().loss_fn, batch, mesh=mesh, schedule="fold", config=QUICK
            )
        except InputError as error:
            refused = f"{error.message} {error.hint}"
        one = seen["one_strand"][0]
        return {
            "same": {name: same(one, values) for name, (values, _) in seen.items()},
            "actions": {name: count for name, (_, count) in seen.items()},
            "refused": refused,
        }


def test_folded_has_the_bits_of_one_strand() -> None:
    """Tensor parallel with a tied head: losses, gradients and weights of 20 steps, in an order
    that no search would make; and losses without gradients."""
    ranks = run_ranks("test_folded:tensor_parallel", 2, timeout_s=200)
    for facts in (rank.value for rank in ranks):
        assert facts["different"] == []
        assert (facts["steps"], facts["chunks"], facts["evaluated"]) == (STEPS, True, True)
        assert facts["names"] > 10
        assert facts["both"] == ["forward_0+backward_1", "forward_1+backward_0"]


@pytest.mark.parametrize("layout", ["zero3x2 tp2", pytest.param("zero1x2 tp2", marks=WIDE)])
def test_folded_with_sharded_data_parallelism(layout: str) -> None:
    """ZeRO-3, which gathers weights in every chunk, and ZeRO-1, which gathers once a step and
    reduces at its end, each with tensor parallelism on 4 ranks."""
    for rank in run_ranks("test_folded:sharded", 4, args=[layout], timeout_s=200):
        assert rank.value == []


def test_compile_step_takes_a_schedule() -> None:
    """By name or as a function from a file of the user's own; another name is refused."""
    own = "test_folded:all_forwards_first"
    for facts in (r.value for r in run_ranks("test_folded:compiled", 2, timeout_s=200)):
        names = ["one_strand", "two_strand", "folded", own]
        assert facts["same"] == dict.fromkeys(names, True)
        assert facts["actions"] == {
            "one_strand": 8, "two_strand": 5, "folded": 10, own: 8,
        }  # fmt: skip
        assert "unknown schedule 'fold'" in facts["refused"]
        assert "folded" in facts["refused"]


class Dropped(torch.nn.Module):
    """Two layers with dropout between, so that masks cross the fold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.dropout(torch.relu(layer(x)), 0.3) + x
        return x.square().mean()


def four_chunks(ranks: int, micro_batches: int, chunks: int = 4) -> tuple[tuple[Action, ...], ...]:
    """Interleaved 1F1B of one rank."""
    return interleaved(ranks, micro_batches, chunks)


def three_chunks(ranks: int, micro_batches: int, chunks: int = 3) -> tuple[tuple[Action, ...], ...]:
    """All forwards, then all backwards, chunk by chunk."""
    return gpipe(ranks, micro_batches, chunks)


@traced_once()
def test_chunks_with_dropout_on_one_rank() -> None:
    """Masks follow from seeds, so they are those of one strand in every chunk, of two and more."""
    seen = []
    schedules = ("one_strand", "folded", "eager_folded", "gpipe", three_chunks, four_chunks)
    for schedule in schedules:
        torch.manual_seed(1)
        model = Dropped()
        batches = [(torch.randn(4, 8),) for _ in range(3)]
        step = interlace.compile_step(
            model, lambda m, x: m(x), batches[0], schedule=schedule, config=QUICK
        )
        loss = step(batches)
        seen.append({**gradients_of(model), "loss": loss})
        chunks = step.executor.schedule.chunks
        assert len(step.strands.parts) == 2 * chunks
        assert all(part.operators for part in step.strands.parts.values())
    for found in seen[1:]:
        assert same(seen[0], found)


@traced_once()
def test_chunks_of_an_unmodified_model_of_transformers() -> None:
    """A GPT-2 whose head is tied to its embedding, in two, three and four chunks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    torch.manual_seed(1)
    batches = [(torch.randint(64, (2, 8)), torch.randint(64, (2, 8))) for _ in range(4)]
    seen = []
    for schedule in ("one_strand", "folded", three_chunks, four_chunks):
        torch.manual_seed(2)
        model = GPT2LMHeadModel(GPT2Config(**sizes, **ends)).eval()
        step = interlace.compile_step(
            model, logits_loss, batches[0], schedule=schedule, config=QUICK
        )
        seen.append({"loss": step(batches), **gradients_of(model)})
    for found in seen[1:]:
        assert same(seen[0], found)


def logits_loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())


def test_graphs_too_small_to_fold_are_refused() -> None:
    """By name, and with what to do. One whose backward of a chunk is empty is not too small."""
    model = torch.nn.Linear(2, 1, bias=False)
    batches = [(torch.tensor([[1.0, 2.0]]),)] * 2
    step = interlace.compile_step(
        model, lambda m, x: m(x).sum(), batches[0], schedule="folded", config=QUICK
    )
    step(batches)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 2.0]]
    with pytest.raises(InputError, match="too few for 2 chunks") as caught:
        interlace.compile_step(
            model, lambda m, x: m(x).view(()), (torch.ones(1, 2),), schedule="folded", config=QUICK
        )
    assert "two_strand" in str(caught.value.hint)


def test_a_schedule_that_cannot_run_is_refused_before_anything_is_traced() -> None:
    """Its action is named, and the module is not even called."""

    def backwards(
        ranks: int, micro_batches: int, chunks: int = 1
    ) -> tuple[tuple[Action, ...], ...]:
        return (tuple(reversed(all_forwards_first(ranks, micro_batches)[0])),)

    def never(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("called")

    with pytest.raises(InputError, match="before the forward of micro-batch") as caught:
        interlace.compile_step(
            torch.nn.Linear(2, 1), never, (torch.ones(1, 2),), schedule=backwards, config=QUICK
        )
    assert "backwards" in caught.value.message
