"""What crosses from stage to stage where stages are laid out differently, and how it moves.

Every rank has traced the whole model in the layout of its own stage, and cut it where all others
do. So both ends of a message know the same tensors in the same order, each in parts of its own
shape; from these follow the layouts (`reshard.planning.inferred_layouts`), and from them a plan. Of
values that graphs show to be alike on all ranks of an axis (`graphs.alike`) only one is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import fx

from interlace.errors import InputError
from interlace.graphs.alike import is_alike, unlike_nodes
from interlace.graphs.module_paths import module_path
from interlace.hardware.topology import host_groups
from interlace.ir.actions import Direction
from interlace.parallel.meshes import CONTEXT_AXIS
from interlace.ranks.agree import refused_together
from interlace.ranks.small_collectives import gather_json
from interlace.reshard.agreement import ASSUMED, host_name
from interlace.reshard.planning.inferred_layouts import InferredLayouts, infer_layouts
from interlace.reshard.planning.join import joined
from interlace.reshard.planning.make_plan import make_plan
from interlace.reshard.planning.transfer_plan import TensorSpec
from interlace.reshard.program import Program, make_program, receives_first
from interlace.runtime.handovers import Carried, ChunkRoute, Handovers
from interlace.runtime.stage_meshes import DATA_AXES, StageMeshes

_MESSAGE_BYTES = 64 << 20
"""Most bytes of one send: a choice, that of `reshard.settings`."""
_SEARCH_S = 0.1
"""Seconds for which the order of a message's sends may be searched; a choice, as there is a message
for each pair of chunks."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What a message between two chunks is, seen from this rank."""

    number: int
    """Of the messages of a micro-batch, alike on all ranks."""
    order: tuple[int, ...]
    """By tensor of the plan, its place in what this rank hands over."""
    layouts: tuple[InferredLayouts, ...]
    """By tensor of the plan."""
    program: Program
    names: tuple[str, ...]
    """By tensor of the plan, what errors call it."""


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a message, in the layout of a stage."""

    path: str
    """The module that made it; empty where that is not known."""
    part: tuple[int, ...]
    """The shape of a rank's part."""
    dtype: str
    itemsize: int
    alike: tuple[str, ...]
    """Axes of the stage whose ranks all hold the same."""


def boundaries_of(
    handovers: Handovers, stages: StageMeshes, strategy: str = "auto"
) -> dict[ChunkRoute, Boundary]:
    """How the messages of this rank's stage move, by a strategy of `make_plan`. Collective on the
    default group.

    Raises InputError, on all ranks alike, where stages do not agree on what crosses, or on how it
    is laid out."""
    _refuse_shared(handovers, stages)
    alike = _alike(handovers, stages)
    with refused_together():
        ordered = {route: _in_order(values) for route, values in handovers.messages.items()}
        own = {
            _text(route): [
                [*_facts(handovers.messages[route][place]), alike(handovers.messages[route][place])]
                for place in order
            ]
            for route, order in ordered.items()
        }
    of_ranks = gather_json({"messages": own, "host": host_name()}, None)
    topology = replace(
        ASSUMED, hosts=host_groups({rank: said["host"] for rank, said in enumerate(of_ranks)})
    )
    seen = [of_ranks[leader]["messages"] for leader in stages.leaders]
    routes = sorted({route for each in seen for route in each})
    found: dict[ChunkRoute, Boundary] = {}
    for number, text in enumerate(routes):
        route = _route(text)
        ends = [handovers.rank_of[chunk] for chunk in route[1:]]
        tensors = [[_tensor(*each) for each in seen[end].get(text, [])] for end in ends]
        layouts = _layouts(text, route, ends, tensors, stages)
        if stages.number in ends:
            specs = _specs(text, layouts, tensors[0])
            plan = joined(make_plan(specs, topology, strategy=strategy, time_limit_s=_SEARCH_S))
            names = tuple(_called(text, place, each) for place, each in enumerate(tensors[0]))
            found[route] = Boundary(
                number=number,
                order=ordered[route],
                layouts=tuple(layouts),
                program=receives_first(
                    make_program(plan, dist.get_rank(), most_bytes=_MESSAGE_BYTES)
                ),
                names=names,
            )
    return found


def _alike(handovers: Handovers, stages: StageMeshes) -> Callable[[Carried], list[str]]:
    """Which axes of this rank's stage hold a value alike, as far as graphs can tell. Collective on
    the stage. Ranks along the axes of data differ, whatever graphs say."""
    traced = handovers.traced
    of_ranks = gather_json(traced.texts(), stages.stage)
    spreads = traced.spreads(unlike_nodes(traced.nodes, of_ranks))
    names = stages.mesh.mesh_dim_names or ()
    ranks = {
        axis: tuple(dist.get_process_group_ranks(stages.mesh.get_group(axis)))
        for axis in names
        if axis not in (*DATA_AXES, CONTEXT_AXIS)
    }
    return lambda value: [axis for axis, own in ranks.items() if is_alike(spreads[value.node], own)]


def _tensor(
    path: str, part: Sequence[int], dtype: str, itemsize: int, alike: Sequence[str]
) -> _Tensor:
    return _Tensor(path, tuple(part), dtype, itemsize, tuple(alike))


def _specs(
    text: str, layouts: Sequence[InferredLayouts], tensors: Sequence[_Tensor]
) -> list[TensorSpec]:
    return [
        TensorSpec(
            name=f"{text} {place}", shape=each.source.shape, itemsize=tensor.itemsize,
            source=each.source, destination=each.destination,
        )
        for place, (each, tensor) in enumerate(zip(layouts, tensors, strict=True))
    ]  # fmt: skip


def _layouts(
    text: str,
    route: ChunkRoute,
    ends: Sequence[int],
    tensors: Sequence[Sequence[_Tensor]],
    stages: StageMeshes,
) -> list[InferredLayouts]:
    sent, awaited = tensors
    if not _agree(sent, awaited):
        shown = [", ".join(f"{t.path or 'a value'} {list(t.part)}" for t in side) or "nothing"
                 for side in tensors]  # fmt: skip
        raise InputError(
            f"stage {ends[0]} hands over {shown[0]} as {text}, and stage {ends[1]} awaits "
            f"{shown[1]}",
            hint="begin chunks with whole sub-modules (split_at), so that the same values cross "
            "whatever the layout",
        )
    source, destination = (stages.meshes[end] for end in ends)
    found = []
    for place, (one, other) in enumerate(zip(sent, awaited, strict=True)):
        name = _called(text, place, one)
        alike = {*one.alike} & {*other.alike}
        layouts = infer_layouts(name, source, one.part, destination, other.part, alike)
        over = [axis for axis in layouts.copied if axis in DATA_AXES]
        if over and route[0] == Direction.BACKWARD:
            raise InputError(
                f"{name} is the gradient of a value that does not depend on the sample, and "
                f"stages {ends[0]} and {ends[1]} have axes {over[0]} of different widths, so its "
                "parts would have to be added up on the way",
                hint="compute the value in the stage that reads it, or give both stages as many "
                "ranks that see different samples",
            )
        found.append(layouts)
    return found


def _agree(sent: Sequence[_Tensor], awaited: Sequence[_Tensor]) -> bool:
    return len(sent) == len(awaited) and all(
        one.dtype == other.dtype and len(one.part) == len(other.part) and one.path == other.path
        for one, other in zip(sent, awaited, strict=True)
    )


def _refuse_shared(handovers: Handovers, stages: StageMeshes) -> None:
    if handovers.shared:
        name = handovers.shared[0].removeprefix("module.")
        holders = handovers.holders(handovers.shared[0])
        raise InputError(
            f"the parameter {name!r} is used by stages {', '.join(map(str, holders))}, which are "
            f"laid out each in its own way: {'; '.join(map(str, stages.meshes))}",
            hint="give each stage a weight of its own (an untied head), or lay all stages out "
            "alike, with an axis pp",
        )


def _in_order(values: Sequence[Carried]) -> tuple[int, ...]:
    """The places of these values in the order in which the graph makes them, which is that of the
    model's code in any layout; names are not."""
    position: dict[fx.Graph, dict[fx.Node, int]] = {}
    for value in values:
        graph = value.node.graph
        if graph not in position:
            position[graph] = {node: index for index, node in enumerate(graph.nodes)}
    keys = [position[value.node.graph][value.node] for value in values]
    return tuple(sorted(range(len(values)), key=keys.__getitem__))


def _facts(value: Carried) -> list[Any]:
    like = value.like
    return [module_path(value.node), list(like.shape), str(like.dtype), like.element_size()]


def _called(text: str, place: int, tensor: _Tensor) -> str:
    made_by = f" made by {tensor.path.removeprefix('module.')!r}" if tensor.path else ""
    return f"tensor {place} of {text}{made_by}"


def _text(route: ChunkRoute) -> str:
    """`forward_0>1`."""
    return f"{route[0]}_{route[1]}>{route[2]}"


def _route(text: str) -> ChunkRoute:
    way, chunks = text.rsplit("_", 1)
    source, to = chunks.split(">")
    return Direction(way), int(source), int(to)
