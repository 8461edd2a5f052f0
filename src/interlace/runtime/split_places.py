"""Where chunks begin if nobody says so, in words that hold for every layout of a model.

Ranks whose graphs differ, as they are laid out differently, can only agree on sub-modules.
"""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import fx

from interlace.errors import InputError
from interlace.graphs.module_paths import module_path
from interlace.ranks.agree import refused_together
from interlace.ranks.small_collectives import broadcast_text
from interlace.runtime.chunks import USERS, cuts
from interlace.runtime.traced_strands import FORWARD, Strands


def modules_to_split_at(strands: Strands, chunks: int) -> tuple[str, ...]:
    """The sub-modules with which so many chunks begin, but the first: of those that lie directly
    in the model or in a list of it, those whose beginnings are nearest to equal shares of the
    arithmetic. Between these a layout over ranks has values that are whole or cut into equal parts;
    inside them there may be sums of which each rank has a term.

    Raises InputError for a model with too few of them."""
    starts = _starts(strands)
    graph = strands.op_graphs[FORWARD]
    done = [0, *accumulate(op.flops or 1 for op in graph.operators)]
    found: list[str] = []
    last = 0
    for number, at in enumerate(cuts(graph, chunks), 1):
        left = chunks - 1 - number
        able = [place for place in sorted(starts) if place > last]
        able = able[: len(able) - left]
        if not able:
            raise InputError(
                f"{chunks} chunks are to begin with whole blocks, and the model has {len(starts)} "
                f"behind its start: {', '.join(starts.values()) or 'none'}",
                hint="use a schedule with fewer chunks, or name sub-modules by split_at",
            )
        last = min(able, key=lambda place: abs(done[place] - done[at]))
        found.append(starts[last])
    return tuple(found)


def _starts(strands: Strands) -> dict[int, str]:
    """By number of operators before it: the block that begins there, the outermost if there are
    several."""
    return _first_of(strands, lambda parts: len(parts) == 1 or parts[-1].isdigit())


def blocks_of(strands: Strands) -> tuple[str, ...]:
    """The sub-modules between which a model can be cut, in their order: those that lie directly in
    the model or in a list of it that is in no other list, and the neighbours of such a list, as a
    head behind the layers is. Without the one that comes first."""
    paths = (_path(node) for node in strands.parts[FORWARD].operators.values())
    lists = {_list_of(parts) for parts in paths} - {()}
    holders = {each[:-1] for each in lists}

    def is_block(parts: Sequence[str]) -> bool:
        inside = tuple(parts[:-1])
        beside_a_list = inside in holders and tuple(parts) not in lists
        return len(parts) == 1 or inside in lists or beside_a_list

    return tuple(name for _, name in sorted(_first_of(strands, is_block).items()))


def _list_of(parts: Sequence[str]) -> tuple[str, ...]:
    """The names down to the outermost list on this path; nothing if there is none on it."""
    found = [number for number, part in enumerate(parts) if part.isdigit()]
    return tuple(parts[: found[0]]) if found else ()


def _first_of(strands: Strands, wanted: Callable[[Sequence[str]], bool]) -> dict[int, str]:
    """By number of operators before it, but 0: the wanted sub-module that begins there."""
    seen: set[str] = set()
    found: dict[int, str] = {}
    for place, node in enumerate(strands.parts[FORWARD].operators.values()):
        parts = _path(node)
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name in seen:
                continue
            seen.add(name)
            if place and wanted(parts[:end]):
                found.setdefault(place, name)
    return found


def _path(node: fx.Node) -> list[str]:
    """The names of the sub-modules of the user's module, from the outside in, that it is from."""
    path = module_path(node).removeprefix(USERS)
    return path.split(".") if path else []


def agreed_split(traced: Callable[[], Strands], chunks: int) -> tuple[str, ...]:
    """The sub-modules by the graphs of the first rank. Collective on the default group."""
    with refused_together():
        names = modules_to_split_at(traced(), chunks)
    return tuple(json.loads(broadcast_text(json.dumps(names))))
