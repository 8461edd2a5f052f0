"""Context parallelism through the traced graphs: right numbers, one program on all ranks, and sends
that wait for nothing that they could run under."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import pytest
from processes import run_ranks

SEQUENCE, SAMPLES, VOCABULARY = 16, 2, 32
BOUND = 1e-10


def build(architecture: str) -> Any:
    """A small model in float64, the same on every rank."""
    import torch

    from interlace.config import ModelConfig
    from interlace.models import model_file

    shape = ModelConfig(layers=1, width=32, heads=4, kv_heads=2, ffn_width=48)
    torch.manual_seed(3)
    return model_file(architecture).build(shape, VOCABULARY, SEQUENCE).double()


def batch(seed: int) -> tuple[Any, Any]:
    """Tokens and targets [samples, sequence]."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=draw)
    return text[:, :-1], text[:, 1:]


class Runner:
    """Runs lowered strands of one chunk, one after the other or two at a time."""

    def __init__(self, module: Any, chunk: Any) -> None:
        import torch

        from interlace.graphs.accumulate import accumulate_gradients
        from interlace.graphs.parts import GraphPart

        self.module, self.chunk = module, chunk
        self.graphs = {
            "forward": chunk.forward,
            "backward": accumulate_gradients(chunk, torch.float64),
        }
        self.names = {name: list(GraphPart.whole(g).operators) for name, g in self.graphs.items()}
        parameters = dict(module.named_parameters())
        self.sums = {name: torch.zeros_like(parameters[name]) for name in chunk.parameters}
        self.constants = {("parameter", n): p.detach() for n, p in parameters.items()}
        self.constants |= {("buffer", n): b for n, b in module.named_buffers()}
        self.constants |= {("gradient", n): g for n, g in self.sums.items()}
        self.constants["tangent", ""] = torch.ones((), dtype=torch.float64)

    def run(self, of_strand: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Loss and saved values of the strand `forward`, if it runs; `of_strand` has its batch, and
        the saved values of `backward`. Two strands take turns, operator by operator."""
        import torch

        from interlace.graphs.lower import lower

        graphs = {name: self.graphs[name] for name in of_strand}
        columns = [
            [f"{name}.{operator}" if len(graphs) > 1 else operator for operator in self.names[name]]
            for name in graphs
        ]
        order = [name for row in zip_longest(*columns) for name in row if name is not None]
        lowered = lower(graphs, order)
        inputs = []
        for strand, binding in lowered.inputs:
            if binding.role == "batch":
                inputs.append(of_strand[strand][int(binding.target)])
            elif binding.role == "saved":
                inputs.append(of_strand[strand][binding.target])
            else:
                inputs.append(self.constants[binding.role, binding.target])
        with torch.no_grad():
            values = lowered.module(inputs)
        made = [v for (s, _), v in zip(lowered.outputs, values, strict=True) if s == "forward"]
        if not made:
            return None, {}
        return made[0], dict(zip(self.chunk.saved, made[1:], strict=True))


def uncovered(graph: Any) -> list[str]:
    """Collectives with no attention after them, or which the next attention has to wait for."""
    found, needs = [], {op.id: set(op.inputs) for op in graph.operators}
    for op in graph.operators:
        needs[op.id].update(*(needs[source] for source in op.inputs))
    for place, op in enumerate(graph.operators):
        later = [o.id for o in graph.operators[place:] if o.kind == "attention"]
        if op.is_collective and (not later or op.id in needs[later[0]]):
            found.append(op.id)
    return found


def model_child(architecture: str, method: str) -> dict[str, Any]:
    """Two micro-batches, one strand and two; and their gradients on one device."""
    import torch
    import torch.distributed as dist
    from processes import gloo_group
    from torch.distributed.device_mesh import init_device_mesh

    from interlace.graphs.op_graphs import export
    from interlace.graphs.trace import trace_chunk
    from interlace.models import model_file
    from interlace.parallel.context import apply_context_parallel, local_positions
    from interlace.train.built_model import NextTokenLoss

    with gloo_group():
        ranks, rank = dist.get_world_size(), dist.get_rank()
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        module = NextTokenLoss(build(architecture))
        plan = model_file(architecture).CONTEXT_PLAN
        apply_context_parallel(module.model, mesh, plan, method, SEQUENCE)
        mine = local_positions(SEQUENCE, ranks, rank, method)
        batches = [tuple(x[:, mine] for x in batch(seed)) for seed in (1, 2)]
        runner = Runner(module, trace_chunk(module, batches[0]))
        one, two = (both_batches(runner, batches, strands) for strands in (1, 2))
        axes = {mesh.get_group().group_name: "cp"}
        graphs = {name: export(graph, axes) for name, graph in runner.graphs.items()}
        return {
            "errors": compare(one, NextTokenLoss(build(architecture))),
            "same": all(torch.equal(one[name], two[name]) for name in one | two),
            "digests": [graph.digest for graph in graphs.values()],
            "uncovered": {name: uncovered(graph) for name, graph in graphs.items()},
        }


def both_batches(runner: Runner, batches: list[Any], strands: int) -> dict[str, Any]:
    """Losses, and the sum of the gradients of both micro-batches, by name."""
    for total in runner.sums.values():
        total.zero_()
    first, saved = runner.run({"forward": batches[0]})
    if strands == 1:
        runner.run({"backward": saved})
        second, saved = runner.run({"forward": batches[1]})
    else:
        second, saved = runner.run({"forward": batches[1], "backward": saved})
    runner.run({"backward": saved})
    gradients = {name: total.clone() for name, total in runner.sums.items()}
    return {"first loss": first, "second loss": second, **gradients}


def compare(found: dict[str, Any], whole: Any) -> dict[str, float]:
    """Largest relative errors of the means over ranks, against eager autograd on one device."""
    import torch.distributed as dist

    losses = [whole(*batch(seed)) for seed in (1, 2)]
    sum(losses).backward()  # type: ignore[union-attr]
    true = {name: parameter.grad for name, parameter in whole.named_parameters()}
    # The gradient of a key's bias is zero, but for rounding.
    floor = 1e-3 * max(gradient.abs().max() for gradient in true.values())
    true |= {"first loss": losses[0].detach(), "second loss": losses[1].detach()}
    errors = {}
    for name, value in true.items():
        mean = found[name].clone()
        dist.all_reduce(mean)
        error = (mean / dist.get_world_size() - value).abs().max()
        errors[name] = float(error / max(value.abs().max(), floor))
    return errors


@pytest.mark.parametrize(
    ("architecture", "method", "ranks"), [("llama", "ring", 4), ("gpt", "ulysses", 2)]
)
def test_traced_models_compute_what_one_device_computes(
    architecture: str, method: str, ranks: int
) -> None:
    """Losses and every gradient, averaged over ranks, equal eager autograd on whole sequences; two
    strands give the bits of one; all ranks trace the same program. Ring: every send has a block of
    attention to run under, forward and backward."""
    args = [architecture, method]
    results = run_ranks("test_context_graphs:model_child", ranks, args=args)
    for result in results:
        errors = result.value["errors"]
        assert len(errors) >= 14
        assert not {name: error for name, error in errors.items() if not error < BOUND}
        assert result.value["same"]
        assert result.value["digests"] == results[0].value["digests"]
        if method == "ring":
            assert result.value["uncovered"] == {"forward": [], "backward": []}
