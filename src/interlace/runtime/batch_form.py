"""Batches that are more than a tuple of tensors: dicts, lists and tuples of them, in any depth.

A step runs on a flat tuple of tensors. The form of the example says which they are, and puts them
together again for `loss_fn` while it is traced. What is no tensor is part of the form: equal in all
batches, and a constant of the graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from interlace.errors import InputError

_CONSTANTS = (int, float, bool, str, type(None))
Maker = Callable[[Sequence[Tensor]], Any]
"""Puts a value together from the tensors of a flat batch."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor, by its place in the flat batch."""

    place: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A dict, a list or a tuple."""

    keys: tuple[Any, ...]
    parts: tuple[Any, ...]
    """Leaves, nodes or constants."""
    kind: type


class BatchForm:
    """How a batch is made of tensors."""

    def __init__(self, example: Any) -> None:
        """Raises InputError for a value that is neither a tensor nor a number, a text or None."""
        found: list[Tensor] = []
        self._is_spread = type(example) in (tuple, list)
        self._root = _form_of(example, "example_inputs", found)
        self.example = tuple(found)
        """The tensors of the example."""
        self.is_plain = self._is_spread and all(isinstance(each, Tensor) for each in example)
        """Whether a batch is a tuple or list of tensors."""
        self._make = _maker(self._root)

    @property
    def words(self) -> str:
        """The form and the shapes, equal for batches that one step takes: `(int64[2, 8], ...)`, and
        behind it the places of what is no plain tuple of tensors. Without the number of a GPU."""
        shapes = ", ".join(
            f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in self.example
        )
        device = "".join(sorted({f" on {each.device.type}" for each in self.example}))
        return f"({shapes}){device}" + ("" if self.is_plain else f" in {_outline(self._root)}")

    def flat(self, batch: Any, where: str) -> tuple[Tensor, ...]:
        """The tensors of a batch of this form. Raises InputError for one of another form, saying
        where in it."""
        found: list[Tensor] = []
        _collect(self._root, batch, where, found)
        return tuple(found)

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """What `loss_fn` gets behind the module: the parts of a tuple or list, else the batch."""
        made = self._make(tensors)
        return tuple(made) if self._is_spread else (made,)


def _form_of(value: Any, where: str, found: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        found.append(value)
        return _Leaf(len(found) - 1)
    if isinstance(value, _CONSTANTS):
        return value
    items = _items(value)
    if type(value).__name__ == "BlockMask":
        raise InputError(
            f"{where} is a BlockMask of FlexAttention, which holds its mask as a function",
            hint="give a boolean tensor, for attn_mask of "
            "torch.nn.functional.scaled_dot_product_attention. FlexAttention is not traced: it "
            "would take operators of a graph that hold that function, forward and backward",
        )
    if items is None:
        raise InputError(
            f"{where} is {type(value).__name__}, which is no tensor, number, text or None, and no "
            "dict, list or tuple of them",
            hint="other values belong into loss_fn or the module",
        )
    keys, kind, parts = items
    forms = tuple(
        _form_of(part, f"{where}[{key!r}]", found) for key, part in zip(keys, parts, strict=True)
    )
    return _Node(keys, forms, kind)


def _outline(form: Any) -> str:
    """A form as people write it, with a number for each tensor: {'tokens': 0, 'labels': 1}."""
    if isinstance(form, _Leaf):
        return str(form.place)
    if not isinstance(form, _Node):
        return repr(form)
    parts = [_outline(part) for part in form.parts]
    if form.kind is dict:
        pairs = zip(form.keys, parts, strict=True)
        return "{" + ", ".join(f"{key!r}: {part}" for key, part in pairs) + "}"
    return f"{form.kind.__name__}({', '.join(parts)})"


def _items(value: Any) -> tuple[tuple[Any, ...], type, tuple[Any, ...]] | None:
    """(keys, kind, parts) of a container; any mapping counts as a dict."""
    if isinstance(value, Mapping):
        return tuple(value), dict, tuple(value.values())
    if isinstance(value, (tuple, list)):
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        kind = type(value) if is_named else (list if isinstance(value, list) else tuple)
        return tuple(range(len(value))), kind, tuple(value)
    return None


def _collect(form: Any, value: Any, where: str, found: list[Tensor]) -> None:
    if isinstance(form, _Leaf):
        if not isinstance(value, Tensor):
            raise _other(where, type(value).__name__, "a tensor")
        found.append(value)
        return
    if not isinstance(form, _Node):
        if type(value) is not type(form) or value != form:
            raise _other(where, f"{value!r:.40}", f"{form!r:.40}")
        return
    items = _items(value)
    wanted = "keys" if form.kind is dict else "parts"
    shown = ", ".join(map(str, form.keys)) if form.kind is dict else str(len(form.keys))
    if items is None:
        raise _other(where, type(value).__name__, f"a {form.kind.__name__} ({wanted}: {shown})")
    keys, kind, parts = items
    of_sequence = kind is not dict and form.kind is not dict
    alike = len(keys) == len(form.keys) if of_sequence else set(keys) == set(form.keys)
    if not alike:
        given = ", ".join(map(str, keys)) if kind is dict else str(len(keys))
        raise _other(where, f"a {kind.__name__} ({wanted}: {given})", f"{wanted}: {shown}")
    by_key = dict(zip(keys, parts, strict=True))
    for key, part in zip(form.keys, form.parts, strict=True):
        _collect(part, by_key[key], f"{where}[{key!r}]", found)


def _other(where: str, given: str, wanted: str) -> InputError:
    return InputError(
        f"{where} is {given}, and the step was compiled for {wanted}",
        hint="make all micro-batches like example_inputs, or compile another step",
    )


def _maker(form: Any) -> Maker:
    if isinstance(form, _Leaf):
        place = form.place
        return lambda tensors: tensors[place]
    if not isinstance(form, _Node):
        return lambda tensors: form
    makers = tuple(_maker(part) for part in form.parts)
    if form.kind is dict:
        named = tuple(zip(form.keys, makers, strict=True))
        return lambda tensors: {key: make(tensors) for key, make in named}
    if form.kind in (tuple, list):
        kind = form.kind
        return lambda tensors: kind([make(tensors) for make in makers])
    named_tuple: Any = form.kind
    return lambda tensors: named_tuple(*[make(tensors) for make in makers])
