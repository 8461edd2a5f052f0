"""Small run files, and what is recorded of each: graphs, plans, and the bits of five steps.

    python tests/gloo/neutral_runs.py --record             make tests/gloo/neutral.json again
    python tests/gloo/neutral_runs.py --record tp gpt      these run files only, the others stay

Make the record again only for a change that is meant to change graphs, plans or bits.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from processes import run_ranks

RECORD = Path(__file__).with_name("neutral.json")
LIMIT_S = 240.0
STEPS = 5
ENVIRONMENT = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
"""So that bits depend as little as can be on the kind of CPU; ranks have one thread each."""
BASE = f"""
[model]
layers = 2
width = 64
heads = 4
kv_heads = 4
ffn_width = 96
[data]
path = "text"
sequence_length = 32
[optimizer]
learning_rate = 3e-3
warmup_steps = 2
[train]
steps = {STEPS}
micro_batches = 3
micro_batch_size = 2
evaluate_every = 0
evaluate_batches = 2
[plan]
trial_steps = 0
cache = false
[link]
latency_us = 20.0
[hardware]
peak_tflops = 0.05
memory_gb_per_s = 8.0
[output]
record_every = 5
[watchdog]
dead_after_s = 60.0
"""
PLANNED_RATE = "1gbit"
SLOW = {"5 micro-batches": "250mbit", "gpt": "250mbit", "zero 3 x tp": "400mbit"}
"""Link rates for plans, with slower ones where these hide less; training uses the real link."""
HUGGING_FACE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_TENSOR = {"parallel.tensor": "2"}
_SHARD = {"parallel.data_shard": "2"}
_GPT = _TENSOR | {"model.architecture": "gpt", "model.ffn_width": "128"}
RUNS: dict[str, dict[str, str]] = {
    "tp": _TENSOR,
    "tp, grouped queries, tied head": _TENSOR | {"model.kv_heads": "2", "model.tied_head": "true"},
    "cp ring": {"parallel.context": "2", "parallel.context_method": "ring"},
    "cp ulysses": {"parallel.context": "2", "parallel.context_method": "ulysses"},
    "zero 1": _SHARD | {"parallel.zero": "1"},
    "zero 3": _SHARD | {"parallel.zero": "3"},
    "zero 3, reduced each": _SHARD | {"parallel.reduce": "micro_batch"},
    "zero 3 x tp": _SHARD | _TENSOR,
    "replicate": {"parallel.data_replicate": "2"},
    "replicate x zero 3": _SHARD | {"parallel.data_replicate": "2"},
    "hugging face": _TENSOR | {"model.source": "hugging_face", "model.config": "model"},
    "recompute layer": _TENSOR | {"train.recompute": "layer"},
    "recompute attention": _TENSOR | {"train.recompute": "attention"},
    "recompute budget": _TENSOR | {"train.recompute": "budget", "train.recompute_mib": "0.5"},
    "decompose ring": _TENSOR | {"overlap.decompose": "ring", "overlap.pieces": "2"},
    "decompose slicing": _TENSOR | {"overlap.decompose": "slicing", "overlap.pieces": "2"},
    "decompose ends": _TENSOR
    | {"overlap.decompose": "ring", "overlap.pieces": "1", "overlap.passes": "ends"},
    "bf16": _TENSOR | {"train.dtype": "bfloat16"},
    "bf16 zero 3": _SHARD | {"train.dtype": "bfloat16"},
    "gpt": _GPT,
    "dropout": _GPT | {"model.dropout": "0.1"},
    "1 micro-batch": _TENSOR | {"train.micro_batches": "1", "strands": "1"},
    "2 micro-batches, no memory to spare": _TENSOR
    | {"train.micro_batches": "2", "plan.extra_memory": "0", "plan.extra_memory_mib": "0"},
    "5 micro-batches": _TENSOR | {"train.micro_batches": "5"},
}
"""Settings on top of `BASE`."""
QUICK = ("zero 3", "decompose ends", "dropout")
"""Trained by default, as strands only; INTERLACE_NEUTRAL=all trains all."""
EAGER = ("tp", "zero 3")
"""Trained by plain autograd as well."""
_DEGREES = ("tensor", "context", "data_shard", "data_replicate")


def ranks_of(name: str) -> int:
    """How many ranks a run file needs."""
    ranks = 1
    for degree in _DEGREES:
        ranks *= int(RUNS[name].get(f"parallel.{degree}", "1"))
    return ranks


def ways_of(name: str) -> tuple[str, ...]:
    """In which ways a run file is trained: the values of `strands`."""
    two = ("2",) if RUNS[name].get("strands") != "1" else ()
    return ("1", *two, *(("eager",) if name in EAGER else ()))


def prepare(folder: Path) -> Path:
    """Write what the run files need into an empty folder; returns it."""
    (folder / "run.toml").write_text(BASE)
    (folder / "text").write_text("".join(_lines()))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(HUGGING_FACE))
    return folder


def plan_all(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Graphs and plans of run files, as they are recorded; two processes share the work. Leaves
    in the folder the plan files with which `train` trains."""
    found = run_ranks(
        "neutral_runs:plan_some",
        2,
        args=[str(folder), list(names)],
        timeout_s=LIMIT_S + 30 * len(names),
        env={"XDG_CACHE_HOME": str(folder / "cache")},
    )
    return {name: planned for each in found for name, planned in each.value.items()}


def plan_some(folder: str, names: list[str]) -> dict[str, Any]:
    """A child: every other run file."""
    import neutral_probe

    os.chdir(folder)
    found = {}
    for name in names[int(os.environ["RANK"]) :: 2]:
        rate = {"link.rate": SLOW.get(name, PLANNED_RATE)}
        traced = neutral_probe.trace("run.toml", RUNS[name] | rate)
        plans, text = neutral_probe.plans_of(traced)
        Path(_plan_file(name)).write_text(text)
        found[name] = {"graphs": neutral_probe.graphs_of(traced), "plans": plans}
    return found


def train(folder: Path, name: str, way: str) -> dict[str, Any]:
    """Losses, and of every rank the bits of gradients, weights and the optimizer's state. `way`
    is what `strands` is set to; the folder is one in which `plan_all` has planned."""
    import neutral_probe

    directory = f"out-{_word(name)}-{way}"
    settings = RUNS[name] | {"strands": way, "output.directory": directory}
    if way == "2":
        settings["plan.file"] = _plan_file(name)
    found = run_ranks(
        "neutral_runs:train_rank",
        ranks_of(name),
        args=[str(folder), settings],
        timeout_s=LIMIT_S,
        env=ENVIRONMENT | {"XDG_CACHE_HOME": str(folder / "cache")},
    )
    losses = neutral_probe.losses_of(str(folder / directory))
    return losses | {"ranks": [rank.value for rank in found]}


def _plan_file(name: str) -> str:
    return f"plan-{_word(name)}"


def _word(name: str) -> str:
    return "-".join(re.findall(r"\w+", name))


def train_rank(folder: str, settings: dict[str, str]) -> dict[str, Any]:
    """A child: train as one rank. Hashes of gradients (as clipped) before each update, and after
    the last update of weights and of the optimizer's state."""
    import neutral_probe
    import torch
    from torch.optim import optimizer

    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    gradients: list[str] = []
    seen: list[torch.optim.Optimizer] = []

    def before(found: torch.optim.Optimizer, *_: Any) -> None:
        gradients.append(_bits(parameter.grad for parameter in _parameters(found)))
        seen[:] = [found]

    os.chdir(folder)
    handle = optimizer.register_optimizer_step_pre_hook(before)
    try:
        neutral_probe.train("run.toml", settings)
    finally:
        handle.remove()
    assert len(gradients) == STEPS
    [last] = seen
    states = [last.state[parameter] for parameter in _parameters(last)]
    return {
        "gradients": gradients,
        "weights": _bits(_parameters(last)),
        "optimizer": _bits(state[key] for state in states for key in sorted(state)),
    }


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _bits(tensors: Any) -> str:
    """One hash of the exact bits of this rank's parts, in whatever order they come."""
    import torch

    found = []
    for tensor in tensors:
        part = tensor.detach()
        part = part.to_local() if hasattr(part, "to_local") else part
        data = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found.append(hashlib.sha256(str(tuple(part.shape)).encode() + data).hexdigest())
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


def _lines() -> Iterator[str]:
    """A text that is the same everywhere."""
    words = ["interlace", "hides", "communication", "behind", "compute", "two", "strands"]
    state = 1
    for _ in range(1500):
        line = []
        for _ in range(8):
            state = (1103515245 * state + 12345) % 2**31
            line.append(words[(state >> 16) % len(words)])
        yield " ".join(line) + ".\n"


def made_with() -> dict[str, Any]:
    """What graphs (versions) and bits (versions and CPU) may depend on."""
    return {"versions": versions(), "cpu": this_cpu(), "environment": ENVIRONMENT}


def versions() -> dict[str, str]:
    """Of what traces and computes; empty where it is missing."""
    found = {}
    for name in ("torch", "transformers"):
        try:
            found[name] = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def this_cpu() -> dict[str, str]:
    """Kind of CPU, and which vector instructions it has."""
    kind = {"machine": platform.machine(), "model": platform.processor(), "vector": ""}
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line.partition(":") for line in info.read_text().splitlines()]
        facts = {key.strip(): value.strip() for key, _, value in reversed(lines)}
        names = ("vendor_id", "cpu family", "model", "model name")
        kind["model"] = ", ".join(facts[name] for name in names if name in facts)
        wanted = ("sse", "ssse", "avx", "fma", "amx", "asimd", "sve")
        flags = facts.get("flags", facts.get("Features", "")).split()
        kind["vector"] = " ".join(sorted(flag for flag in flags if flag.startswith(wanted)))
    return kind


def record(names: Sequence[str]) -> None:
    """Write the record; run files that are not named keep what is recorded of them."""
    old = json.loads(RECORD.read_text()) if RECORD.exists() and names else {}
    runs = dict(old.get("runs", {}))
    with tempfile.TemporaryDirectory(prefix="interlace-neutral-") as name:
        folder = prepare(Path(name))
        planned = plan_all(folder, names or tuple(RUNS))
        for each, found in planned.items():
            training = {way: train(folder, each, way) for way in ways_of(each)}
            runs[each] = {**found, "training": training}
            print(f"recorded {each}", file=sys.stderr, flush=True)
            ordered = {one: runs[one] for one in RUNS if one in runs}
            content = {"made with": made_with(), "runs": ordered}
            RECORD.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--record", action="store_true", required=True, help="write the record")
    parser.add_argument("names", nargs="*", help="only these run files, such as 'cp ring'")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"no run file is called {unknown[0]!r}; there are {', '.join(RUNS)}")
    record(names)


if __name__ == "__main__":
    main()
