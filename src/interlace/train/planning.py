"""`interlace plan`: plan a run without starting it, with no second process and no weights.

The model is built from fake tensors in a fake world of the right size, traced as a rank would, and
planned on computed costs (`cost.analytic`). A training run plans again on measured ones.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from interlace.config import RunConfig, check, parse_rate
from interlace.cost.analytic import MachineModel, analytic_costs, measure_this_machine
from interlace.errors import InputError
from interlace.graphs.torch_private import fake_tensor_mode, init_fake_world
from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.plan import PhasePlan, Plan, to_text
from interlace.models import model_file
from interlace.models.loss import NextTokenLoss
from interlace.parallel.meshes import axis_of_group, build_mesh
from interlace.parallel.tensor import apply_tensor_parallel, loss_context
from interlace.report.tables import aligned, milliseconds, percent, size
from interlace.runtime.strands import Strands, build_strands, make_plan
from interlace.search.bounds import lower_bound_ns
from interlace.search.memory import peak_bytes
from interlace.search.paper import busy_ns, order_paper
from interlace.search.planner import SEARCHES, plan_phase
from interlace.search.problem import Problem
from interlace.train.session import DTYPES, vocabulary
from interlace.train.tokens import open_tokenizer
from interlace.train.weights import cast_parameters

ASSUMED_RATE = "10gbit"


def plan_command(config: RunConfig, output: Path | None) -> int:
    """Plan `config`: a summary and the plan on stdout, or the plan in `output`."""
    check(config)
    strands = trace_fake(config)
    costs = _costs(config, strands.op_graphs)
    plan = make_plan(
        strands.op_graphs,
        costs,
        config.plan.search,
        memory_bytes=int(config.plan.memory_mib * 2**20),
    )
    text = to_text(plan, dict(strands.op_graphs))
    print(summary(plan, strands.op_graphs, costs, config), file=sys.stderr)
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from error
    print(output)
    return 0


def trace_fake(config: RunConfig) -> Strands:
    """The graphs of one rank of `config`, traced on fake tensors."""
    ranks = config.parallel.tensor
    tokens = -(-open_tokenizer(config.data.tokenizer).vocab_size // ranks) * ranks
    vocab_size = vocabulary(config, tokens)
    init_fake_world(ranks)
    try:
        mesh = build_mesh(config.parallel, "cpu")
        files = model_file(config.model.architecture)
        with fake_tensor_mode():
            model = files.build(config.model, vocab_size, config.data.sequence_length)
            apply_tensor_parallel(model, mesh, files.TENSOR_PLAN)
            module = NextTokenLoss(model)
            if config.train.dtype != "float32":
                cast_parameters(module, DTYPES[config.train.dtype])
            shape = (config.train.micro_batch_size, config.data.sequence_length)
            # Two tensors: one given twice would be traced as a single input.
            text, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
            with loss_context(mesh):
                return build_strands(module, (text, targets), axis_of_group(mesh))
    finally:
        dist.destroy_process_group()


def _costs(config: RunConfig, graphs: Mapping[str, OpGraph]) -> CostTable:
    flops = config.hardware.peak_tflops * 1e12
    memory = config.hardware.memory_gb_per_s * 1e9
    if not (flops and memory):
        measured = measure_this_machine()
        flops, memory = flops or measured[0], memory or measured[1]
    rate = parse_rate(config.link.rate or ASSUMED_RATE, "link.rate")
    machine = MachineModel(
        flops_per_s=flops,
        bytes_per_s=memory,
        link_bits_per_s=rate,
        link_latency_ns=int(config.link.latency_us * 1e3),
    )
    return analytic_costs(graphs, machine, {"tp": config.parallel.tensor})


def summary(plan: Plan, graphs: Mapping[str, OpGraph], costs: CostTable, config: RunConfig) -> str:
    """The chosen plan phase by phase, and what each search would give for the pair."""
    assumed = "" if config.link.rate else " (assumed; set --link.rate)"
    phases = []
    for name, phase in plan.phases.items():
        problem = Problem(graphs[name], costs.of(graphs[name]), costs.issue_ns)
        peak = peak_bytes(graphs[name], phase.order)
        phases.append((name, str(len(phase.order)), *_figures(problem, phase, peak)))
    pair = Problem(graphs["pair"], costs.of(graphs["pair"]), costs.issue_ns)
    searches = []
    for search in SEARCHES:
        phase = plan_phase(pair, search)
        searches.append((search, *_figures(pair, phase, peak_bytes(pair.graph, phase.order))))
    blocks = order_paper(pair)
    gap = blocks.length_ns / lower_bound_ns(pair) - 1
    exposed = blocks.length_ns - busy_ns(pair)
    searches.append(
        ("paper", milliseconds(blocks.length_ns), milliseconds(exposed), percent(gap), "-")
    )
    step = milliseconds(plan.step_ns(config.train.micro_batches))
    figures = ("predicted ms", "exposed ms", "over bound", "peak memory")
    return "\n".join(
        [
            f"costs: {costs.source}, link {config.link.rate or ASSUMED_RATE}{assumed}",
            "",
            aligned(("phase", "operators", *figures), phases, text_columns=1),
            "",
            aligned(("pair by search", *figures), searches, text_columns=1),
            "",
            f"step of {config.train.micro_batches} micro-batches: {step} ms predicted",
        ]
    )


def _figures(problem: Problem, phase: PhasePlan, peak: int) -> tuple[str, str, str, str]:
    gap = phase.predicted_ns / lower_bound_ns(problem) - 1
    return (
        milliseconds(phase.predicted_ns),
        milliseconds(phase.exposed_ns),
        percent(gap),
        size(peak),
    )
