"""Where the times of `interlace plan` come from: a file that `interlace profile` wrote, a cluster,
or the machine that the run file describes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from interlace.config import RunConfig, parse_rate
from interlace.decompose.choose import Request
from interlace.decompose.rewrite.apply import Decompose
from interlace.decompose.site_costs import computed_times
from interlace.degrees import resolve_layout
from interlace.errors import InputError
from interlace.hardware.cluster import Cluster
from interlace.hardware.cluster_costs import ClusterMachine, cluster_costs
from interlace.hardware.computed_costs import Machine, MachineModel, analytic_costs
from interlace.ir import store
from interlace.ir.costs import CostTable, cost_of
from interlace.ir.graph import OpGraph
from interlace.measure.machine import measure_this_machine
from interlace.parallel.meshes import axis_groups, axis_sizes
from interlace.report.cost_tables import warning
from interlace.rules import described_cluster
from interlace.runtime.stage_gathers import timed_graphs
from interlace.runtime.traced_strands import Strands

ASSUMED_RATE = "10gbit"
"""Rate of the link where the run file gives none."""
_NAMED = 3
"""So many estimated operators are named."""


def cluster_of(config: RunConfig, name: str, cost: Path | None) -> Cluster:
    """The cluster that `--cluster` names, which says all about the machine.

    Raises InputError if there is none, if the run has more ranks than it has devices, or if there
    are figures of another machine as well.
    """
    if cost is not None:
        raise InputError(
            f"--cost {cost} and --cluster {name} both give the times of operators",
            hint="leave one of the two out",
        )
    return described_cluster(config, name, f"--cluster {name}")


def read_costs(path: Path) -> CostTable:
    """A file that `interlace profile` wrote. Raises InputError if it is none."""
    try:
        return store.load(path, CostTable)
    except InputError as error:
        hint = error.hint or f"write it with: interlace profile RUN -o {path}"
        raise InputError(error.message, hint=hint) from error


def computed_costs(
    config: RunConfig, graphs: Mapping[str, OpGraph], cluster: Cluster | None = None
) -> tuple[CostTable, str]:
    """Costs on a rank of `cluster`, or else on the machine that the run file describes, and in
    words where they come from."""
    parallel = resolve_layout(config, config.parallel.ranks).parallel
    if cluster is not None:
        costs = cluster_costs(graphs, cluster, axis_groups(parallel))
        return costs, f"computed for {_described(config, cluster, costs.links)}"
    machine, words = machine_of(config)
    costs = analytic_costs(graphs, machine, axis_sizes(parallel))
    return costs, f"computed for {words}"


def _described(config: RunConfig, cluster: Cluster, links: Mapping[str, str]) -> str:
    """`cluster a800: 312 TFLOP/s and 2039 GB/s; tp inside hosts, dp_shard across hosts`."""
    words = f"cluster {cluster.name}: {cluster.peak_tflops:g} TFLOP/s"
    if config.train.dtype != "bfloat16":
        words += f" (of bfloat16; the run computes in {config.train.dtype})"
    words += f" and {cluster.memory_gb_per_s:g} GB/s"
    where = {"intra_host": "inside hosts", "inter_host": "across hosts"}
    over = ", ".join(f"{lane} {where[link]}" for lane, link in links.items())
    return f"{words}; {over}" if over else words


def machine_of(config: RunConfig) -> tuple[MachineModel, str]:
    """The machine that the run file describes, and in words where that comes from."""
    flops = config.hardware.peak_tflops * 1e12
    memory = config.hardware.memory_gb_per_s * 1e9
    by = "given"
    if not (flops and memory):
        measured = measure_this_machine()
        flops, memory = flops or measured[0], memory or measured[1]
        by = "measured here"
    assumed = "" if config.link.rate else ", assumed: set --link.rate"
    rate = config.link.rate or ASSUMED_RATE
    machine = MachineModel(
        flops_per_s=flops,
        bytes_per_s=memory,
        link_bits_per_s=parse_rate(rate, "link.rate"),
        link_latency_ns=int(config.link.latency_us * 1e3),
    )
    return machine, (
        f"{flops / 1e12:.3g} TFLOP/s and {memory / 1e9:.4g} GB/s ({by}), link {rate}{assumed}"
    )


def decompose_of(config: RunConfig, cluster: Cluster | None) -> Decompose | None:
    """What `[overlap]` asks for, with times computed from the cluster or the run file's machine."""
    overlap = config.overlap
    if overlap.decompose == "off":
        return None
    request = Request(variant=overlap.decompose, pieces=overlap.pieces)
    machine: Machine = (
        ClusterMachine(cluster, axis_groups(config.parallel)) if cluster else machine_of(config)[0]
    )
    return Decompose(request=request, times=computed_times(machine))


def measured_costs(
    table: CostTable, where: str, strands: Strands, *, interpolate: bool
) -> tuple[CostTable, str]:
    """`table` with times for all operators, and in words where they come from.

    Raises InputError if the table belongs to another graph, unless `interpolate`; then if an
    operator is like none of the table's.
    """
    if not interpolate and table.graph_digest != strands.digest:
        raise InputError(
            f"{where} was made for graph {table.graph_digest or 'of no name'}, and this run has "
            f"graph {strands.digest}",
            hint="profile this run, or add --interpolate to estimate what was not measured",
        )
    pair = strands.pair
    times = table.of(pair, interpolate=interpolate)
    missing = {op.key: op for op in pair.operators if op.key not in table.operators}
    origin = "\n".join(filter(None, [f"{table.source}, {where}", warning(table)]))
    if not missing:
        return table, origin
    estimates = {key: cost_of(op, times[op.id]) for key, op in missing.items()}
    names = ", ".join(op.id for op in list(missing.values())[:_NAMED])
    more = ", ..." if len(missing) > _NAMED else ""
    return replace(
        table,
        operators={**table.operators, **estimates},
        source=f"{table.source}, interpolated",
        graph_digest=strands.digest,
    ), (
        f"{origin}\nestimated: {len(table.estimated(pair))} of {len(pair.operators)} operators, "
        f"{len(missing)} different ones: {names}{more}"
    )


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Where the times of operators come from."""

    table: CostTable | None
    """What was measured; None to compute them."""
    file: Path | None
    """That it is from."""
    cluster: Cluster | None
    interpolate: bool
    """Whether what the table lacks is estimated."""

    def of(self, config: RunConfig, strands: Strands) -> tuple[CostTable, str]:
        """Costs of all operators, of a pipeline those of all chunks, and in words where they come
        from. Raises InputError for what the table cannot say."""
        in_stages = config.parallel.pipeline > 1
        if self.table is None:
            graphs = timed_graphs(strands) if in_stages else strands.op_graphs
            return computed_costs(config, graphs, self.cluster)
        if in_stages and strands.data is not None:
            raise InputError(
                f"--cost {self.file}: the stages of this run gather their weights in each chunk "
                f"(parallel.zero = {config.parallel.zero}), which no profile has measured",
                hint="leave it out, and give --cluster, or hardware.* and link.*",
            )
        return measured_costs(self.table, str(self.file), strands, interpolate=self.interpolate)
