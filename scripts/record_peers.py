"""Run other simulators on the published steps of `interlace bench simulator`, and record the times.

    python scripts/record_peers.py --calculon CHECKOUT --simumax CHECKOUT

Both are on no package index, so each needs a checkout: https://github.com/calculon-ai/calculon and
https://github.com/MooreThreads/SimuMax (which imports pandas, sympy, tabulate, tqdm, matplotlib).
Each gets the shapes, the layout and the settings that our own model gets, its own file of the GPU,
and the network of the source; nothing is fitted. Rows of a tool that is not given stay as they are.
What is written, `presets/measured/peers.csv`, is what the bench shows beside ours.
"""

import argparse
import contextlib
import copy
import csv
import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import interlace.presets
from interlace.bench.simulator_rows import MeasuredStep, measured_rows
from interlace.text import aligned

TABLE = Path(interlace.presets.__path__[0]) / "measured" / "peers.csv"
FIELDS = ("peer", "commit", "recorded", "table", "row", "step_time_s", "memory_gib")
CALCULON = {"A100": "a100_80g", "GH200": "h100_80g_nvl8"}
"""Its file by the GPU of a source; of its two of an A100 the one that comes out nearer."""
SIMUMAX = {"B200": "b200_bf16_ceperm", "A100": "a100_pcie"}
UNBOUNDED = 10**9
"""GiB of a device, so that what is too large by a tool's own count is still timed."""
NVLINK_A100 = 300
"""GB/s each way between devices of an A100 host with NVLink."""
Result = tuple[float, float | None]
"""Seconds of a step, and GiB of the fullest rank if the tool says so."""


def calculon_steps(checkout: Path) -> Callable[[MeasuredStep, str], Result]:
    """The function that runs it. It knows GPT without embedding and head, no gated feed-forward,
    no grouped heads, no ZeRO-3."""
    sys.path.insert(0, str(checkout))
    from calculon.llm import Llm
    from calculon.system import System

    def run(step: MeasuredStep, gpu: str) -> Result:
        cluster = step.cluster
        system = json.loads((checkout / "systems" / f"{CALCULON[gpu]}.json").read_text())
        system["mem1"]["GiB"] = UNBOUNDED
        inside, between = system["networks"]
        inside["size"] = cluster.devices_per_host
        between["bandwidth"] = cluster.inter_host.gbit_per_s / 8
        model = Llm(Llm.Application(_calculon_model(step)), logging.getLogger())
        on = System(system)
        model.compile(on, Llm.Execution.from_json(_calculon_execution(step)))
        model.run(on)
        return model.get_total_time(), None

    return run


def _calculon_model(step: MeasuredStep) -> dict[str, int]:
    job = step.job
    return {
        "hidden": job.hidden,
        "feedforward": job.ffn,
        "seq_size": job.sequence,
        "attn_heads": job.heads,
        "attn_size": job.head_size,
        "num_blocks": job.layers,
    }


def _calculon_execution(step: MeasuredStep) -> dict[str, Any]:
    job, host = step.job, step.cluster.devices_per_host
    recompute = {"full": "full", "none": "none", "attention": "attn_only"}[job.recompute]
    return {
        "num_procs": job.ranks,
        "tensor_par": job.tensor,
        "pipeline_par": job.pipeline,
        "data_par": job.data,
        "tensor_par_net": int(job.tensor > host),
        "pipeline_par_net": int(job.ranks > host),
        "data_par_net": int(job.tensor * job.data > host),
        "batch_size": job.micro_batches * job.micro_batch * job.data,
        "microbatch_size": job.micro_batch,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": recompute,
        "pipeline_interleaving": job.chunks,
        "optimizer_sharding": job.sharding > 0 and job.data > 1,
        "tensor_par_comm_type": "rs_ag" if job.sequence_parallel else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": False,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def simumax_steps(checkout: Path) -> Callable[[MeasuredStep, str], Result]:
    """The function that runs it. Its A100 file is of PCIe hosts: there the links inside of a host
    become NVLink with the efficiencies of its B200 file."""
    sys.path.insert(0, str(checkout))
    from simumax.core.config import (
        ModelConfig,
        StrategyConfig,
        SystemConfig,
    )
    from simumax.core.perf_llm import PerfLLM

    files = checkout / "configs" / "system"
    systems = {
        gpu: json.loads((files / f"{name}.json").read_text()) for gpu, name in SIMUMAX.items()
    }

    def run(step: MeasuredStep, gpu: str) -> Result:
        system = copy.deepcopy(systems[gpu])
        system["accelerator"]["mem_gbs"] = UNBOUNDED
        if gpu == "A100":
            _nvlink(system, systems["B200"], step)
        perf = PerfLLM()
        with contextlib.redirect_stdout(io.StringIO()):
            perf.configure(
                strategy_config=StrategyConfig.init_from_dict(_simumax_strategy(step)),
                model_config=ModelConfig.init_from_dict(_simumax_model(step)),
                system_config=SystemConfig.init_from_dict(system),
            )
            perf.run_estimate()
            cost, memory = perf.analysis_cost(), perf.analysis_mem().data
        stages = [memory] if "peak_mem" in memory else list(memory.values())
        peaks = [float(str(each["peak_mem"]).split()[0]) for each in stages]
        seconds = cost.data["duration_time_per_iter"]
        return _seconds(seconds), max(peaks)

    return run


def _seconds(text: str) -> float:
    number, unit = str(text).split()
    return float(number) * {"ms": 1e-3, "s": 1.0, "us": 1e-6}[unit]


def _nvlink(system: dict[str, Any], other: dict[str, Any], step: MeasuredStep) -> None:
    """Replace PCIe, and the network by that of the source (GB/s of a host)."""
    cluster = step.cluster
    system["num_per_node"] = cluster.devices_per_host
    networks = copy.deepcopy(other["networks"])
    for name in ("low_intra_node", "high_intra_node"):
        networks[name]["bandwidth"]["gbps"] = NVLINK_A100
    ports = cluster.inter_host.gbit_per_s / 8 * cluster.devices_per_host
    networks["inter_node"]["bandwidth"]["gbps"] = ports
    networks["inter_node"]["bandwidth"]["efficient_factor"] = 0.6  # of its A100 file
    system["networks"] = networks


def _simumax_model(step: MeasuredStep) -> dict[str, Any]:
    job = step.job
    return {
        "model_type": "dense",
        "model_name": "row",
        "hidden_size": job.hidden,
        "head_num": job.heads,
        "kv_head_num": job.kv_heads or job.heads,
        "head_size": job.head_size,
        "intermediate_size": job.ffn,
        "layer_num": job.layers,
        "vocab_size": job.vocab,
        "use_swiglu": job.gated,
    }


def _simumax_strategy(step: MeasuredStep) -> dict[str, Any]:
    job = step.job
    stage = -(-job.layers // job.pipeline)
    found = {
        "seq_len": job.sequence,
        "micro_batch_size": job.micro_batch,
        "micro_batch_num": job.micro_batches,
        "world_size": job.ranks,
        "tp_size": job.tensor,
        "pp_size": job.pipeline,
        "interleaving_size": job.chunks,
        "enable_sequence_parallel": job.sequence_parallel and job.tensor > 1,
        "zero_state": 1 if job.sharding or job.gated else 0,
        "pp_comm_async": False,
        "enable_dropout": False,
        "use_flash_sdp": job.attention != "unfused",
        "use_math_sdp": job.attention == "unfused",
        "use_fp32_accum_grad": job.gradient_bytes == 4,
        "cross_entropy_loss_fusion": job.gated,
        "te_version": "2.11.0",
        "enable_straggler_model": False,
        "enable_recompute": job.recompute == "full",
        "recompute_granularity": "full_block",
        "recompute_layer_num": stage if job.recompute == "full" else 0,
    }
    if job.end_layers_fewer:
        ends = int(job.layers_of_stages()[0])
        found["num_layers_in_first_pipeline_stage"] = ends
        found["num_layers_in_last_pipeline_stage"] = ends
    return found


def applies(peer: str, source: str, step: MeasuredStep) -> str:
    """The GPU's file that a row is run with; empty where the tool does not describe it."""
    job, gpu = step.job, source.rpartition(", ")[2]
    plain = job.sharding < 3 and job.recompute != "alternate" and step.layout is None
    kind = next((name for name in ("GH200", "B200", "A100") if gpu.startswith(name)), "")
    if not plain or source.startswith("torchtitan"):
        return ""
    if peer == "calculon":
        known = kind in CALCULON and not job.gated and job.kv_heads in (0, job.heads)
        return kind if known else ""
    return kind if kind in SIMUMAX else ""


def recorded(peer: str, checkout: Path) -> Iterator[dict[str, object]]:
    """Its rows; those that it refuses are told and left out."""
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    run = {"calculon": calculon_steps, "simumax": simumax_steps}[peer](checkout)
    said = []
    for source, rows in measured_rows().items():
        used, refused = 0, dict[str, int]()
        for step in rows.steps:
            gpu = applies(peer, source, step)
            if not gpu:
                continue
            try:
                seconds, memory = run(step, gpu)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:90]
                refused[reason] = refused.get(reason, 0) + 1
                continue
            used += 1
            yield {
                "peer": peer,
                "commit": commit,
                "recorded": datetime.now(UTC).date().isoformat(),
                "table": step.table,
                "row": step.row,
                "step_time_s": f"{seconds:.6g}",
                "memory_gib": "" if memory is None else f"{memory:.4g}",
            }
        if used or refused:
            said.append((source, str(used), "; ".join(f"{n} x {r}" for r, n in refused.items())))
    print(f"{peer} {commit}\n" + aligned(("source", "rows", "refused"), said, text_columns=1))


def main() -> int:
    """Run the tools that are given, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calculon", type=Path, help="a checkout of calculon-ai/calculon")
    parser.add_argument("--simumax", type=Path, help="a checkout of MooreThreads/SimuMax")
    given = vars(parser.parse_args())
    paths = {peer: path.resolve() for peer, path in given.items() if path is not None}
    kept: list[dict[str, object]] = []
    if TABLE.exists():
        with TABLE.open(encoding="utf-8", newline="") as file:
            kept += [row for row in csv.DictReader(file) if row["peer"] not in paths]
    found = [row for peer, path in paths.items() for row in recorded(peer, path)]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + found)
    print(TABLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
