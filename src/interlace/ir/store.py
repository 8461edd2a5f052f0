"""Graphs, cost tables and timelines as JSON files, read strictly.

A file that lacks a field, has one too many or holds a wrong type is an InputError that names the
file and the place in it.
"""

import json
import os
import secrets
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_origin

from interlace.errors import InputError

T = TypeVar("T")


def _converter() -> Any:
    # Imported here: planning and running on a GPU machine need no JSON and often have no cattrs.
    import cattrs  # noqa: PLC0415
    from cattrs.cols import list_structure_factory  # noqa: PLC0415

    converter = cattrs.Converter(forbid_extra_keys=True)

    @converter.register_structure_hook_factory(lambda type_: get_origin(type_) is tuple)
    def _tuple(type_: Any, converter: Any) -> Any:
        items = list_structure_factory(type_, converter)
        return lambda value, _: tuple(items(_exactly(value, list), type_))

    # By itself cattrs would call the type: int("5"), int(1.7), tuple("abc").
    for type_ in (int, str, bool):
        converter.register_structure_hook(type_, _exactly)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(StrEnum, lambda value, type_: type_(value))
    return converter


def _exactly(value: Any, type_: type) -> Any:
    if type(value) is not type_:
        raise TypeError(f"expected {type_.__name__}, not {value!r}")
    return value


def _number(value: Any, _: type) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"expected a number, not {value!r}")
    return float(value)


def dumps(value: object) -> str:
    """A dataclass as one line of JSON."""
    return json.dumps(_converter().unstructure(value), separators=(",", ":"))


def loads(text: str, type_: type[T], where: str) -> T:
    """A dataclass from JSON. Raises InputError that names `where` and the place in it."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers and nests beyond Python's limits
        raise InputError(f"{where} is not valid JSON: {error}") from error
    from cattrs import transform_error  # noqa: PLC0415
    from cattrs.v import format_exception  # noqa: PLC0415

    def reason(error: BaseException, type_: type | None) -> str:
        return error.message if isinstance(error, InputError) else format_exception(error, type_)

    try:
        return _converter().structure(data, type_)
    except Exception as error:  # cattrs raises groups of many types
        reasons = "; ".join(transform_error(error, format_exception=reason))
        raise InputError(
            f"{where} is not a valid {type_.__name__}: {reasons}",
            hint="write it again with this version of interlace",
        ) from error


def save(value: object, path: Path) -> None:
    """Write a dataclass as JSON; the file appears whole or not at all."""
    write_whole(path, dumps(value).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and its folder, so that it appears whole or not at all.

    Any number of processes may write the same file at a time: each has a temporary file of its
    own beside it, and the last one to rename wins. The content is on the disk before its name
    is. Raises OSError, and leaves no temporary file then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: Path, type_: type[T]) -> T:
    """Read a dataclass written by `save`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return loads(text, type_, str(path))
