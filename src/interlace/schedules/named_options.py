"""Options behind a schedule's name, as a run file gives them: `eager_folded(depth=5)`."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from interlace.errors import InputError, nearest

_CALL = re.compile(r"([^()]+)\((.*)\)")
_OPTION = re.compile(r"\s*(\w+)\s*=\s*(-?\d+)\s*")
_NOT_OPTIONS = ("ranks", "micro_batches")
"""Of a schedule's parameters those that the job gives."""


def split_options(text: str) -> tuple[str, Mapping[str, int]]:
    """`name(option=number, ...)` as the name and its options; a bare name has none.

    Raises InputError for anything else in brackets."""
    found = _CALL.fullmatch(text.strip())
    if found is None:
        return text, {}
    name, given = found[1].strip(), found[2]
    options: dict[str, int] = {}
    for each in given.split(","):
        option = _OPTION.fullmatch(each)
        if option is None:
            raise InputError(
                f"schedule {text!r}: {each.strip()!r} is no option and its whole number",
                hint="write it as eager_folded(depth=5)",
            )
        options[option[1]] = int(option[2])
    return name, options


def with_options(
    name: str, function: Callable[..., Any], options: Mapping[str, int]
) -> tuple[str, Callable[..., Any]]:
    """A schedule's function with these options as its defaults, and a name that says so. Raises
    InputError for an option that it has not."""
    if not options:
        return name, function
    known = [each for each in inspect.signature(function).parameters if each not in _NOT_OPTIONS]
    for option in options:
        if option not in known:
            raise InputError(
                f"schedule {name!r} has no option {option!r}",
                hint=nearest(option, known) if known else "it has none",
            )
    text = ",".join(f"{option}={value}" for option, value in options.items())
    made: Any = partial(function, **options)
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return f"{name}({text})", made
