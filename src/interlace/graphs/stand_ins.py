"""Capturing a deep module with stand-ins for most of its equal blocks.

Running the Python of every block takes most of the time of a capture, and all that has to be seen
of a block in the middle is how it is called. So calls of blocks are marked in the graph, and those
of blocks that a twin leaves out stand there as one operator each, which gives tensors of the form
that a block of the same kind gives in the twin.

    entered(2, args, kwargs)   operators of block 2   left(2, result)        a block that is kept
    result = stand_in(7, form, args, kwargs)                                 one that is left out
"""

import dis
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from interlace.graphs.blocks import Stack
from interlace.graphs.periods import PeriodsDifferError

NUMBER = "_interlace_block"
"""Attribute that holds a block's number while its calls are marked."""
Form = tuple[Any, ...]
"""What a block gives, as constants: a tensor like one of its arguments, a tensor of given sizes, a
constant, or a tuple or list of forms."""


def entered(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Marks the call of a block."""


def left(number: int, result: Any) -> None:
    """Marks what a block gave."""


def stand_in(number: int, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """New tensors of the form of a block's results."""
    return _made(form, tensors_in((args, kwargs)))


def marked(blocks: Mapping[int, nn.Module], forms: Mapping[int, Form] | None = None) -> ExitStack:
    """Until this is closed, a capture marks the calls of these blocks, by their numbers; those that
    have a form are replaced by stand-ins.

    Raises PeriodsDifferError if a block has a forward that is not its class's, or compares objects
    by identity: it could ask which block it is, and no capture tells that.
    """
    if any("forward" in vars(block) for block in blocks.values()):
        raise PeriodsDifferError("a block has a forward of its own")
    for code in {code for block in blocks.values() for code in _codes_of(block)}:
        if _asks_for_identity(code):
            raise PeriodsDifferError(f"{code.co_qualname} compares objects by identity")
    for mark in (entered, left, stand_in):
        torch.compiler.allow_in_graph(mark)
    # By place: for a key of a dictionary the capture would look at all of them, at each call.
    table = tuple((forms or {}).get(number) for number in range(1 + max(blocks)))
    with ExitStack() as stack:
        for kind in {type(block) for block in blocks.values()}:
            forward = _marking(kind.forward, table)
            stack.enter_context(mock.patch.object(kind, "forward", forward))
        for number, block in blocks.items():
            vars(block)[NUMBER] = number
            stack.callback(vars(block).pop, NUMBER)
        return stack.pop_all()


def _marking(forward: Callable[..., Any], forms: tuple[Form | None, ...]) -> Callable[..., Any]:
    """A forward that marks calls. The capture runs it, so it is plain Python."""

    def marking(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        number = getattr(self, NUMBER, None)
        if number is None:
            return forward(self, *args, **kwargs)
        form = forms[number]
        if form is not None:
            return stand_in(number, form, args, kwargs)
        entered(number, args, kwargs)
        result = forward(self, *args, **kwargs)
        left(number, result)
        return result

    return marking


def forms_of(twin: fx.GraphModule, stack: Stack) -> dict[int, Form]:
    """What stand-ins of the blocks that the twin of `stack` leaves out give, by their numbers: what
    the block of their kind in the twin's second period gives.

    Raises PeriodsDifferError if blocks are not called one after the other, or if a result is more
    than tensors in tuples and lists.
    """
    calls: dict[int, list[fx.Node]] = {}
    for node in twin.graph.nodes:
        if node.target in (entered, left):
            calls.setdefault(number_of(node), []).append(node)
    if any([node.target for node in pair] != [entered, left] for pair in calls.values()):
        raise PeriodsDifferError("a block is not called just once")
    second = stack.head + stack.period
    forms = {}
    for number in range(second + stack.period, stack.depth - stack.tail):
        like = second + (number - stack.head) % stack.period
        if like not in calls:
            raise PeriodsDifferError(f"block {like} is not called where the loss is computed")
        call, end = calls[like]
        forms[number] = _form(end.args[1], tensors_in(call.args[1:]))
    return forms


def number_of(mark: fx.Node) -> int:
    """The block that a mark or a stand-in is of."""
    number = mark.args[0]
    assert isinstance(number, int)
    return number


def without_marks(captured: fx.GraphModule) -> None:
    """Erase the marks of kept blocks, which compute nothing."""
    for node in list(captured.graph.nodes):
        if node.target in (entered, left):
            captured.graph.erase_node(node)
    captured.recompile()


def tensors_in(values: Any) -> list[Any]:
    """The tensors, or nodes, among nested arguments, in order."""
    if isinstance(values, (Tensor, fx.Node)):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    return [t for each in values for t in tensors_in(each)] if _is_list(values) else []


def _codes_of(block: nn.Module) -> Iterator[CodeType]:
    """Code of the methods of a block and of its sub-modules, and of functions that they hold."""
    modules = list(block.modules())
    kinds = {kind for each in modules for kind in type(each).__mro__ if kind is not nn.Module}
    for holder in (*kinds, *modules):
        for value in vars(holder).values():
            if isinstance(value, (FunctionType, MethodType)):
                yield from _with_inner(value.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _asks_for_identity(code: CodeType) -> bool:
    """Whether code calls `id` or has an `is` that does not ask for a constant such as None."""
    if "id" in code.co_names:
        return True
    steps = list(dis.get_instructions(code))
    return any(
        step.opname == "IS_OP" and before.opname != "LOAD_CONST" for before, step in pairwise(steps)
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _form(result: Any, arguments: list[fx.Node]) -> Form:
    if _is_list(result):
        kind = "list" if isinstance(result, list) else "tuple"
        return (kind, *(_form(each, arguments) for each in result))
    if result is None or isinstance(result, (bool, int, float, str)):
        return ("constant", result)
    if not isinstance(result, fx.Node):
        raise PeriodsDifferError(f"a block gives a {type(result).__name__}")
    value = result.meta["example_value"]
    if not isinstance(value, Tensor):
        raise PeriodsDifferError(f"a block gives a {type(value).__name__}")
    if not isinstance(value, DTensor):
        sizes = (tuple(value.shape), tuple(value.stride()), value.dtype, str(value.device))
        return ("sizes", *sizes, value.requires_grad)
    for number, argument in enumerate(arguments):
        if _layout(argument.meta["example_value"]) == _layout(value):
            return ("like", number, value.requires_grad)
    raise PeriodsDifferError("a block gives a DTensor that is laid out as none of its inputs")


def _layout(tensor: Any) -> Any:
    if not isinstance(tensor, DTensor):
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.placements, tensor.device_mesh


def _made(form: Form, arguments: list[Tensor]) -> Any:
    kind, *rest = form
    if kind == "constant":
        return rest[0]
    if kind in ("tuple", "list"):
        made = [_made(each, arguments) for each in rest]
        return made if kind == "list" else tuple(made)
    if kind == "like":
        number, gradient = rest
        return torch.empty_like(arguments[number]).requires_grad_(gradient)
    size, stride, dtype, device, gradient = rest
    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return made.requires_grad_(gradient)
