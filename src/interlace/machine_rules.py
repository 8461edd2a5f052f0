"""What a run file may say about the machine: its links, and the cluster of its plan."""

from interlace.config import HardwareConfig, LinkConfig, RunConfig, parse_rate, world_of
from interlace.errors import InputError
from interlace.hardware.cluster import Cluster, load_cluster

_FIGURES = ("hardware.peak_tflops", "hardware.memory_gb_per_s", "link.rate", "link.latency_us")
"""Fields that say what a cluster says too."""


def check_machine(config: RunConfig) -> None:
    """Raise InputError for a rate that is none, and for a `plan.cluster` that is not there or does
    not go with the rest of the run: whatever the command, before a model is built."""
    if config.link.rate:
        parse_rate(config.link.rate, "link.rate")
    if config.plan.cluster:
        described_cluster(config, config.plan.cluster, f"plan.cluster = {config.plan.cluster!r}")


def described_cluster(config: RunConfig, name: str, given: str) -> Cluster:
    """The cluster of this name, which says all about the machine; `given` is where it is named, in
    words.

    Raises InputError if there is none, if the run has more ranks than it has devices, or if the run
    has figures of another machine as well.
    """
    defaults = {"hardware": HardwareConfig(), "link": LinkConfig()}
    set_to, unset = [], []
    for key in _FIGURES:
        table, field = key.split(".")
        value = getattr(getattr(config, table), field)
        default = getattr(defaults[table], field)
        if value != default:
            set_to.append(f"{key} = {value!r}")
            unset.append(f"--{key} {default!r}" if default == "" else f"--{key} {default:g}")
    if set_to:
        raise InputError(
            f"{given} says how fast devices and links are, and so does the run: "
            + ", ".join(set_to),
            hint="leave one of the two out; a run file's values are taken back by "
            + " ".join(unset),
        )
    cluster = load_cluster(name)
    cluster.require(world_of(config.parallel))
    return cluster
