"""Run files: TOML to RunConfig, strictly, and back.

A wrong key or type is an InputError that names where it was written (file or flag), the key, the
value and what was expected. Nothing here needs more than the standard library until a file is
written.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import interlace.presets
from interlace.config import RunConfig
from interlace.errors import InputError, nearest
from interlace.old_words import present_search
from interlace.own_code import is_own
from interlace.toml_text import read_toml

_NO_OVERRIDES: Mapping[str, str] = MappingProxyType({})
"""For a run file as it is."""
_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
}
"""Types of values, in words for errors."""

_SEARCHES = ("plan.search", "compare.modes")
"""Fields that name searches, which may be written by their old words."""


def load_run_config(path: str, overrides: Mapping[str, str] = _NO_OVERRIDES) -> RunConfig:
    """Read a TOML file, or a preset by name, and put dotted `overrides` (as text) on top.

    Raises InputError for anything that cannot be read or is not a field of RunConfig. Values that
    have the right type but make no sense are left to `interlace.config.check`.
    """
    file = find_run_file(path)
    written = _structure(read_toml(file)[0], RunConfig, prefix="", where=str(file))
    given = _structure(_nest(overrides), RunConfig, prefix="", where="command line", text=True)
    return _build(RunConfig, _merge(written, given))


def save_run_config(config: RunConfig, path: Path) -> None:
    """Write every field as TOML, so that `load_run_config` gives the same configuration again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run_text(config), encoding="utf-8")


def run_text(config: RunConfig) -> str:
    """The same as text."""
    import tomli_w  # noqa: PLC0415  not on machines that only read run files

    return tomli_w.dumps(config.as_dict())


def preset_files() -> dict[str, Path]:
    """Run files that come with the package, by name; those in `models` only say what to train."""
    folder = Path(interlace.presets.__path__[0])
    files = [*sorted((folder / "runs").glob("*.toml")), *sorted((folder / "models").glob("*.toml"))]
    return {file.stem: file for file in files}


def find_run_file(path: str) -> Path:
    """The file that `path` means: itself if it exists, else the preset of that name."""
    file, presets = Path(path), preset_files()
    if file.is_file():
        return file
    if path in presets:
        return presets[path]
    if file.exists():
        raise InputError(f"{path} is not a file", hint="give the path of a TOML run file")
    if file.suffix == ".toml" or file.name != path:
        raise InputError(
            f"there is no run file {path}",
            hint="give a TOML file, or a preset: " + ", ".join(presets),
        )
    raise InputError(f"there is no run file or preset {path!r}", hint=nearest(path, presets))


def _structure(
    data: Any, type_: Any, *, prefix: str, where: str, text: bool = False
) -> dict[str, Any]:
    """Check a parsed table against a dataclass; return its converted values, nested likewise.

    With `text`, the values are words of the command line.
    """
    if not isinstance(data, dict):
        name = prefix.rstrip(".")
        raise InputError(
            f"{where}: {name} = {data!r} must be a table",
            hint=f"write [{name}] and below it keys such as {fields(type_)[0].name}",
        )
    types = get_type_hints(type_)
    values: dict[str, Any] = {}
    for key, value in data.items():
        name, kind = prefix + key, types.get(key)
        if kind is None:
            raise InputError(f"{where}: unknown key {name}", hint=_known(key, prefix, types))
        if is_dataclass(kind):
            values[key] = _structure(value, kind, prefix=f"{name}.", where=where, text=text)
            continue
        parsed = _parse_text(value, kind) if text else value
        if name == "pipeline.stages":
            parsed = _stage_words(parsed)
        if name in _SEARCHES:
            parsed = _present(parsed, f"{where}: {name}")
        try:
            values[key] = _convert(parsed, kind)
        except TypeError as error:
            raise InputError(
                f"{where}: {name} = {value!r} must be {error}",
                hint=f"as in {name} = {json.dumps(getattr(type_(), key))}",
            ) from error
    return values


def _stage_words(value: Any) -> Any:
    """Tables of stages as words: {tensor = 2} as "tensor=2"."""
    if not isinstance(value, list):
        return value
    return [
        " ".join(f"{key}={degree}" for key, degree in each.items())
        if isinstance(each, dict)
        else each
        for each in value
    ]


def _present(value: Any, where: str) -> Any:
    """`value` of a field that names a search or several, by the words of now."""
    if isinstance(value, list):
        return [_present(each, where) for each in value]
    return present_search(value, where) if isinstance(value, str) else value


def _known(key: str, prefix: str, types: Mapping[str, Any]) -> str:
    """The nearest valid name; a key written in the wrong table is sent to the right one."""
    homes = [f"{table}.{key}" for table, kind in _tables(RunConfig) if key in get_type_hints(kind)]
    if homes:
        return "did you mean " + " or ".join(homes) + "?"
    return nearest(prefix + key, [prefix + name for name in types])


def _tables(type_: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Every table of a run file, those within others too: its dotted name and its dataclass."""
    found = []
    for name, kind in get_type_hints(type_).items():
        if is_dataclass(kind):
            found += [(prefix + name, kind), *_tables(kind, f"{prefix}{name}.")]
    return found


def _convert(value: Any, type_: Any) -> Any:
    """`value` as `type_`, without guessing: 8.0 is no whole number, and "8" is text.

    Raises TypeError with what was expected.
    """
    if get_origin(type_) is Literal:
        choices = {str(choice): choice for choice in get_args(type_)}
        if type(value) in (str, int) and str(value) in choices:
            return choices[str(value)]
        raise TypeError("one of " + ", ".join(map(json.dumps, get_args(type_))))
    if get_origin(type_) is Union:  # a name of ours, or code of a user's own
        ours, _ = get_args(type_)
        if type(value) is str and value not in get_args(ours) and is_own(value):
            return value
        try:
            return _convert(value, ours)
        except TypeError as error:
            raise TypeError(f"{error}, or code of your own that Python finds here") from error
    if get_origin(type_) is tuple:
        if not isinstance(value, list):
            raise TypeError("a list")
        return tuple(_convert(each, get_args(type_)[0]) for each in value)
    if type_ is float and type(value) is int:
        return float(value)
    if type(value) is not type_:
        raise TypeError(_EXPECTED[type_])
    return value


def _parse_text(text: str, type_: Any) -> Any:
    """What TOML would have given; text that does not parse stays text, for `_convert` to refuse."""
    if type_ is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if get_origin(type_) is tuple:
        parts = text.split(",") if text else []
        return [_parse_text(each.strip(), get_args(type_)[0]) for each in parts]
    if type_ in (int, float):
        with contextlib.suppress(ValueError):
            return type_(text)
    return text


def _nest(overrides: Mapping[str, str]) -> dict[str, Any]:
    """{"train.steps": "3"} as {"train": {"steps": "3"}}."""
    nested: dict[str, Any] = {}
    for key, text in overrides.items():
        *tables, name = key.split(".")
        inner = nested
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = text
    return nested


def _merge(lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`lower` with the values of `upper` on top, table by table."""
    for key, value in upper.items():
        lower[key] = _merge(lower.get(key, {}), value) if isinstance(value, dict) else value
    return lower


def _build(type_: Any, values: Mapping[str, Any]) -> Any:
    types = get_type_hints(type_)
    built = {
        key: _build(types[key], value) if is_dataclass(types[key]) else value
        for key, value in values.items()
    }
    return type_(**built)
