"""What is refused before any rank of a run starts: files that are not there, too large a model.

The ranks would say the same some seconds or minutes later, each behind its own start. Without a GPU
weights lie in the machine's own memory, and when that is used up the kernel kills a process. What
is counted here is the least that any layout needs, so that nothing is refused that could run:
weights, or float32 masters, sums of gradients and two moments of AdamW, once for all ranks, or the
whole model that each rank builds before it keeps its part.
"""

import glob
from pathlib import Path

from interlace.config import RunConfig
from interlace.errors import InputError

HELD_BYTES = 16
"""For each parameter, once over all ranks: four float32, of weight, gradient and two moments."""
BUILT_BYTES = 4
"""For each parameter on each rank, while the model is built: float32."""
GIB = 2**30
"""Bytes of a GiB."""
_MATRICES = {"llama": 3, "gpt": 2}
"""Matrices of a feed-forward layer, by architecture; others are not counted."""


def check_host_memory(config: RunConfig, ranks: int, free: int | None = None) -> None:
    """Raise InputError if all `ranks` of a run need more than the `free` bytes of this machine,
    which are looked up if they are not given. Nothing is checked where they are not known, and
    where there is a GPU."""
    free = free_bytes() if free is None else free
    parameters = least_parameters(config)
    needed = parameters * max(HELD_BYTES, BUILT_BYTES * ranks)
    if free is None or needed <= free:
        return
    import torch  # noqa: PLC0415  only where the answer depends on it

    if torch.cuda.is_available():
        return
    each = "weights, gradients and moments of AdamW"
    if BUILT_BYTES * ranks > HELD_BYTES:
        each = f"the whole model, which each of {ranks} ranks builds"
    raise InputError(
        f"the run needs {needed / GIB:,.0f} GiB of memory or more ({parameters / 1e9:.1f} billion "
        f"parameters: {each}), and this machine has {free / GIB:,.1f} GiB free",
        hint="train a smaller model here, as in interlace train quickstart; interlace plan and "
        "interlace simulate take this one as it is",
    )


def least_parameters(config: RunConfig) -> int:
    """Parameters of the large matrices of a dense model of Interlace; 0 for what is built from a
    folder, or by a module of the user's, and for experts."""
    model = config.model
    if model.config or model.source != "interlace" or model.architecture not in _MATRICES:
        return 0
    head = model.head_size or model.width // model.heads
    attention = 2 * model.width * head * (model.heads + model.kv_heads)
    feed_forward = _MATRICES[model.architecture] * model.width * model.ffn_width
    embeddings = model.vocab_size * model.width * (1 if model.tied_head else 2)
    return model.layers * (attention + feed_forward) + embeddings


def free_bytes(
    meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")
) -> int | None:
    """Memory that a new process may use, within the limit of its control group; None where Linux
    does not say."""
    try:
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        most = limit.read_text().strip()
    except OSError:
        return free
    return min(free, int(most)) if most.isdigit() else free


def check_named_files(config: RunConfig) -> None:
    """Raise InputError naming the first file or folder of the run file that does not exist."""
    data, model, plan = config.data, config.model, config.plan
    named = {
        "data.path": ("" if data.path == "stdlib" else data.path, "a file, a folder or a glob"),
        "data.tokenizer": ("" if data.tokenizer == "bytes" else data.tokenizer, "tokenizer.json"),
        "model.config": (model.config, "a folder with a config.json"),
        "plan.file": (plan.file, "a plan that `interlace plan RUN -o FILE` wrote"),
    }
    for key, (path, what) in named.items():
        if path and not _exists(path, pattern=key == "data.path"):
            raise InputError(
                f"{key} = {path!r} does not exist (in {Path.cwd()})",
                hint=f"set {key} to {what}, or leave it out",
            )


def _exists(path: str, *, pattern: bool) -> bool:
    whole = Path(path).expanduser()
    if whole.exists():
        return True
    return pattern and next(glob.iglob(str(whole), recursive=True), None) is not None
