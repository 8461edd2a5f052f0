"""Where chunks begin if nobody says so, in words that hold for every layout of a model.

Ranks whose graphs differ, as they are laid out differently, can only agree on sub-modules.
"""

import json
from collections.abc import Callable
from itertools import accumulate

from interlace.errors import InputError
from interlace.graphs.module_paths import module_path
from interlace.ranks.agree import refused_together
from interlace.ranks.small_collectives import broadcast_text
from interlace.runtime.chunks import USERS, cuts
from interlace.runtime.traced_strands import FORWARD, Strands


def modules_to_split_at(strands: Strands, chunks: int) -> tuple[str, ...]:
    """The sub-modules with which so many chunks begin, but the first: of all that the forward of
    `strands` comes to, those whose beginnings are nearest to equal shares of its arithmetic.

    Raises InputError for a model with too few sub-modules."""
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
                f"the model begins {len(starts)} sub-modules behind its start, too few for "
                f"{chunks} chunks",
                hint="use a schedule with fewer chunks, or a model with more sub-modules",
            )
        last = min(able, key=lambda place: abs(done[place] - done[at]))
        found.append(starts[last])
    return tuple(found)


def _starts(strands: Strands) -> dict[int, str]:
    """By number of operators before it: the sub-module that begins there, the outermost if there
    are several."""
    seen: set[str] = set()
    found: dict[int, str] = {}
    for place, node in enumerate(strands.parts[FORWARD].operators.values()):
        path = module_path(node).removeprefix(USERS)
        parts = path.split(".") if path else []
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name in seen:
                continue
            seen.add(name)
            if place:
                found.setdefault(place, name)
    return found


def agreed_split(traced: Callable[[], Strands], chunks: int) -> tuple[str, ...]:
    """The sub-modules by the graphs of the first rank. Collective on the default group."""
    with refused_together():
        names = modules_to_split_at(traced(), chunks)
    return tuple(json.loads(broadcast_text(json.dumps(names))))
