"""Memory of a graph that several operators fill, each another part of it.

An order of operators follows from dependencies alone, so nobody may read such a buffer by itself.
Who reads it reads `filled(buffer, *writes)`, which depends on everything that writes to it.
"""

from collections.abc import Iterable

from torch import Tensor, fx


def filled(buffer: Tensor, *writes: Tensor) -> Tensor:
    """`buffer` when `writes`, the results of the operators that fill it, are done."""
    del writes
    return buffer


def inside_fills(operators: Iterable[fx.Node]) -> frozenset[int]:
    """How many of these operators, in their order, stand before each place between one that makes
    such a buffer and the last that fills it: what is written there is in the memory of one rank."""
    place = {node: index for index, node in enumerate(operators)}
    found: set[int] = set()
    for reader in {user for node in place for user in node.users if user.target is filled}:
        places = [place[node] for node in reader.all_input_nodes if node in place]
        found.update(range(min(places) + 1, max(places) + 1))
    return frozenset(found)


def written(node: fx.Node) -> list[fx.Node]:
    """The values that an operator changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = position < len(node.args)
        value = node.args[position] if given else node.kwargs.get(argument.name)
        if isinstance(value, fx.Node):
            found.append(value)
    return found


def is_in_place(node: fx.Node) -> bool:
    """Whether an operator writes its result to memory that it is given, and allocates nothing."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    return bool(schema.returns) and all(result.alias_info for result in schema.returns)
