"""The code that ranks run, as content: two hosts may have one version and different files.

What is read is what lies on the disk now. Compiled extensions are told by their versions only.
"""

import functools
import hashlib
import inspect
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

import interlace
from interlace.own_code import file_of
from interlace.ranks.agree import Content

_KINDS = ("*.py", "*.toml")
"""Patterns of the files that are compared: code, and the presets that it reads."""
_BY_VERSION = ("torch", "builtins")
"""Packages that are compared by their version, not file by file."""


def package_contents(root: Path | None = None) -> list[Content]:
    """Every source file of interlace, or of another folder. Takes some 10 ms."""
    root = root or Path(interlace.__file__).parent
    files = sorted(file for kind in _KINDS for file in root.rglob(kind))
    return [_content(f"interlace/{file.relative_to(root).as_posix()}", file) for file in files]


def module_contents(module: nn.Module, *functions: Any) -> list[Content]:
    """The files in which the classes of `module` and its sub-modules are written, their base
    classes, and `functions`. What is not in a file, or is part of torch or of Python, is left out.
    """
    kinds = {base for each in module.modules() for base in type(each).__mro__}
    files: dict[str, Path] = {}
    for each in (*kinds, *(_plain(function) for function in functions)):
        path = _file_of(each)
        if path is not None:
            files[each.__module__] = path
    return [_content(name, path) for name, path in sorted(files.items())]


def own_code_contents(names: Iterable[str]) -> list[Content]:
    """The files of modules of a user's own, as `module` or `module:name`, that a run names. Nothing
    is imported; a module that a rank does not find differs from every file."""
    files = {name.partition(":")[0]: file_of(name) for name in names}
    return [
        _content(f"{name}.py", file)
        if file
        else Content(name=f"source file {f'{name}.py'!r}", digest=b"")
        for name, file in sorted(files.items())
    ]


def _content(name: str, file: Path) -> Content:
    return Content(name=f"source file {name!r}", digest=hashlib.sha256(file.read_bytes()).digest())


def _plain(function: Any) -> Any:
    """The function or class behind wrappers and instances."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    return function if inspect.isfunction(function) or inspect.isclass(function) else type(function)


def _file_of(each: Any) -> Path | None:
    if each.__module__.partition(".")[0] in _BY_VERSION:
        return None
    try:
        name = inspect.getsourcefile(each)
    except (TypeError, OSError):  # built in; or of a prompt or a notebook, where no file is
        return None
    path = Path(name) if name else None
    if path is None or not path.is_file() or _is_standard(path):
        return None
    return path


def _is_standard(path: Path) -> bool:
    """Part of Python itself, not of a package that is installed with it."""
    standard = Path(sysconfig.get_path("stdlib"))
    inside = path.is_relative_to(standard)
    return inside and "site-packages" not in path.relative_to(standard).parts
