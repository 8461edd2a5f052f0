"""A user's own code, named in a run file or on the command line: `module:name`, or `module`.

A schedule, a search and a bench are functions, `my_search:order`; a model is a whole module,
`my_model`, or something in one that has the same names. Modules are looked for where Python looks:
in the working folder, on PYTHONPATH and among installed packages.
"""

import importlib
import importlib.util
from pathlib import Path

from interlace.errors import InputError

_WHERE = "Python looks in the working folder, on PYTHONPATH and among installed packages"
"""Hint where a user's module is not found."""


def is_own(name: str) -> bool:
    """Whether `name` can be code of a user's own: it has a colon, or is a module that Python finds.
    Nothing is imported but the packages that the module is in."""
    return ":" in name or file_of(name) is not None


def file_of(name: str) -> Path | None:
    """The file of the module in `name`, as Python would import it now; None if there is none."""
    module = name.partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a package that is none, or no name of a module at all
        return None
    if found is None or not found.origin or not Path(found.origin).is_file():
        return None
    return Path(found.origin)


def load(name: str, what: str) -> object:
    """The module or the object in it that `name` means; `what` says in messages what it is for.

    Raises InputError if the module cannot be imported or lacks the name."""
    module, colon, path = name.partition(":")
    if not module or (colon and not path):
        raise InputError(f"{what} {name!r} is not module:name", hint="as in my_module:my_function")
    try:
        found: object = importlib.import_module(module)
    except Exception as error:  # whatever the user's file raises
        reason = (
            str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        )
        hint = _WHERE if isinstance(error, ImportError) else "-v shows where it happened"
        raise InputError(f"{what} {name!r} cannot be imported: {reason}", hint=hint) from error
    for part in path.split(".") if path else ():
        if not hasattr(found, part):
            raise InputError(
                f"{what} {name!r} cannot be imported: {getattr(found, '__name__', module)!r} has "
                f"no {part!r}",
                hint=f"add it to {getattr(found, '__file__', module)}, or correct the name",
            )
        found = getattr(found, part)
    return found


def load_function(name: str, what: str) -> object:
    """As `load`. Raises InputError too unless `name` is `module:function` of something to call."""
    if ":" not in name:
        raise InputError(
            f"{what} {name!r} is a module, not a function in one", hint=f"write {name}:function"
        )
    found = load(name, what)
    if not callable(found):
        raise InputError(
            f"{what} {name!r} is a {type(found).__name__}, not a function",
            hint="give module:function",
        )
    return found
