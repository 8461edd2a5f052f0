"""ZeRO-3 in a stage of a pipeline: graphs that gather their weights chunk by chunk.

The chunks of a model are settled on graphs that read whole weights. Then each bucket is gathered in
every chunk that reads it, by the rank that runs the chunk, so no weight goes from stage to stage.
Gradients are added up whole, and shared out at the end of a step (`parallel.stage_shards`).
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from interlace.graphs.data_parallel import gather_each
from interlace.graphs.op_graphs import export, output_storages
from interlace.graphs.parts import GraphPart
from interlace.graphs.torch_private import LazyGraphModule
from interlace.graphs.trace import StrandGraph
from interlace.ir.graph import OpGraph
from interlace.parallel.data import DataLayout
from interlace.runtime.traced_strands import BACKWARD, FORWARD, Strands


def gathered_in_chunks(
    strands: Strands, data: DataLayout, chunk_of: dict[str, dict[str, int]]
) -> Strands:
    """Copies of `strands` with sharded weights gathered. `chunk_of` has the chunk of each operator,
    by the name of its graph and its own; those that gather are added."""
    parts = {
        name: _gathered(strands.parts[name], data, chunk_of[name]) for name in (FORWARD, BACKWARD)
    }
    kept = output_storages(parts[FORWARD].strand, ("loss", *strands.saved))
    storages = {FORWARD: {}, BACKWARD: kept}
    axes = dict(strands.axes)
    return replace(
        strands,
        graphs={**strands.graphs, **{name: part.strand for name, part in parts.items()}},
        parts={**strands.parts, **parts},
        op_graphs={
            **strands.op_graphs,
            **{name: export(part.strand, axes, storages[name]) for name, part in parts.items()},
        },
    )


def timed_graphs(strands: Strands) -> Mapping[str, OpGraph]:
    """Graphs of a stage's model with every operator that its chunks will have: those of `strands`,
    and those that gather by the layout in `strands.data`."""
    if strands.data is None:
        return strands.op_graphs
    one_chunk = {
        name: dict.fromkeys(strands.parts[name].operators, 0) for name in (FORWARD, BACKWARD)
    }
    return gathered_in_chunks(strands, strands.data, one_chunk).op_graphs


def _gathered(part: GraphPart, data: DataLayout, chunk_of: dict[str, int]) -> GraphPart:
    nodes: dict[fx.Node, fx.Node] = {}
    graph, old = fx.Graph(), part.strand
    graph.output(graph.graph_copy(old.graph, nodes))
    copy = StrandGraph(old.name, LazyGraphModule(old.module, graph), dict(old.bindings))
    strand = gather_each(copy, data, chunk_of)
    outputs = tuple(nodes[node] for node in part.outputs)
    return replace(GraphPart.whole(strand), outputs=outputs, names=part.names)
