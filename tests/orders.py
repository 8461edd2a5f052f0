"""Random valid issue orders of an OpGraph, the same on every rank for a seed. No torch."""

import random

from interlace.ir.graph import OpGraph


def random_order(graph: OpGraph, seed: int) -> tuple[str, ...]:
    """Each time, one of the operators whose inputs have all been issued, drawn at random."""
    draw = random.Random(seed)
    waits_for = {op.id: set(op.inputs) for op in graph.operators}
    order: list[str] = []
    while waits_for:
        name = draw.choice([name for name, inputs in waits_for.items() if not inputs])
        del waits_for[name]
        for inputs in waits_for.values():
            inputs.discard(name)
        order.append(name)
    return tuple(order)


def depth_first_order(graph: OpGraph, seed: int) -> tuple[str, ...]:
    """Operators one after the other in a random order, each right after what it still needs.

    Unlike `random_order`, which keeps many operators open, this runs far ahead along one path.
    """
    names = [op.id for op in graph.operators]
    random.Random(seed).shuffle(names)
    order: dict[str, None] = {}

    def issue(name: str) -> None:
        if name not in order:
            for source in graph.by_id[name].inputs:
                issue(source)
            order[name] = None

    for name in names:
        issue(name)
    return tuple(order)
