"""The units of a model from a TOML file.

    [link]                       # how long `boundary_mib` takes; not needed with `boundary_ms`
    gb_per_s = 37.0              # 1e9 byte/s in one direction
    latency_us = 20.0

    [kind.layer]                 # costs for several units
    forward_ms = 1.1             # for one micro-batch
    input_ms = 1.2               # gradients of inputs
    weight_ms = 1.0              # gradients of weights
    saved_mib = 176              # what a forward keeps for its backward
    kept_mib = 170               # what gradients of weights need of that, and of output gradients
    held_mib = 216               # weights, gradients, state of the optimizer
    boundary_mib = 12            # what it hands to the next unit

    [[unit]]
    name = "embedding"           # as the sub-module is called
    forward_ms = 0.1             # costs of its own

    [[unit]]
    name = "layers"              # layers.0, layers.1, ... layers.31
    count = 32
    kinds = ["layer"]            # several take turns

Costs that are left out are 0, and the order of units is that of the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlace.errors import InputError, nearest
from interlace.search.pipelines.model_units import ModelUnit
from interlace.toml_text import read_toml

_TIMES = ("forward", "input", "weight", "boundary")
"""Keys that end in `_ms`."""
_SIZES = ("saved", "kept", "held", "boundary")
"""Keys that end in `_mib`."""
_COSTS = (*(f"{name}_ms" for name in _TIMES), *(f"{name}_mib" for name in _SIZES))
"""Keys of a kind, or of a unit with costs of its own."""
_MS, _MIB = 1e6, 1 << 20
"""Nanoseconds of a millisecond, bytes of a MiB."""
_MOST = 10_000
"""Most units of a file: more is a mistake."""


def read_units(file: Path) -> tuple[ModelUnit, ...]:
    """The units of a file, in order. Raises InputError that names the file and the key."""
    table, _ = read_toml(file)
    where = str(file)
    _only(table, ("link", "kind", "unit"), where)
    link = _table(table.get("link", {}), f"{where}: [link]")
    _only(link, ("gb_per_s", "latency_us"), f"{where}: [link]")
    kinds = {
        name: _costs(_table(given, f"{where}: [kind.{name}]"), link, f"{where}: [kind.{name}]")
        for name, given in _table(table.get("kind", {}), f"{where}: [kind]").items()
    }
    given = table.get("unit", [])
    if not isinstance(given, list) or not given:
        raise InputError(f"{where} has no [[unit]]", hint="write one for each part of the model")
    units: list[ModelUnit] = []
    for number, each in enumerate(given, 1):
        place = f"{where}: [[unit]] {number}"
        units += _units(_table(each, place), kinds, link, place)
    names = [unit.name for unit in units]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{where}: two units are called {twice!r}", hint="each needs a name")
    return tuple(units)


def _units(
    given: Mapping[str, Any],
    kinds: Mapping[str, Mapping[str, int]],
    link: Mapping[str, Any],
    where: str,
) -> list[ModelUnit]:
    _only(given, ("name", "count", "kinds", *_COSTS), where)
    name, count, turns = given.get("name"), given.get("count"), given.get("kinds")
    if not isinstance(name, str) or not name:
        raise InputError(f"{where} has no name", hint='as in name = "layers"')
    if count is not None and (type(count) is not int or not 1 <= count <= _MOST):
        raise InputError(f"{where}: count = {count!r}", hint=f"a whole number, 1 to {_MOST}")
    if turns is None:
        costs = [_costs({k: v for k, v in given.items() if k in _COSTS}, link, where)]
    else:
        if any(key in given for key in _COSTS):
            raise InputError(f"{where} has kinds and costs of its own", hint="leave one of them")
        if not isinstance(turns, list) or not turns:
            raise InputError(f"{where}: kinds = {turns!r}", hint='as in kinds = ["layer"]')
        unknown = next((kind for kind in turns if kind not in kinds), None)
        if unknown is not None:
            raise InputError(
                f"{where}: there is no [kind.{unknown}]", hint=nearest(str(unknown), kinds)
            )
        costs = [kinds[kind] for kind in turns]
    if count is None:
        return [ModelUnit(name=name, **costs[0])]
    return [
        ModelUnit(name=f"{name}.{number}", **costs[number % len(costs)]) for number in range(count)
    ]


def _costs(given: Mapping[str, Any], link: Mapping[str, Any], where: str) -> dict[str, int]:
    """As `ModelUnit` takes them."""
    _only(given, _COSTS, where)
    for name in ("forward_ms", "input_ms", "weight_ms"):
        if name not in given:
            raise InputError(f"{where} has no {name}", hint="0 if it takes no time")
    found = {f"{name}_ns": round(_number(given, f"{name}_ms", where) * _MS) for name in _TIMES}
    sizes = {name: round(_number(given, f"{name}_mib", where) * _MIB) for name in _SIZES}
    boundary = sizes.pop("boundary")
    if boundary:
        rate = _number(link, "gb_per_s", f"{where}: boundary_mib needs [link]")
        if not rate:
            raise InputError(
                f"{where} has boundary_mib, and [link] no gb_per_s",
                hint="give its rate in 1e9 byte/s, or boundary_ms",
            )
        found["boundary_ns"] += round(boundary / rate + _number(link, "latency_us", where) * 1e3)
    return {**found, **{f"{name}_bytes": value for name, value in sizes.items()}}


def _number(given: Mapping[str, Any], key: str, where: str) -> float:
    value = given.get(key, 0)
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        raise InputError(f"{where}: {key} = {value!r}", hint="a number, 0 or more")
    return float(value)


def _table(given: object, where: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise InputError(
            f"{where} is no table", hint="docs/concepts/searched-schedules.md shows one"
        )
    return given


def _only(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in known:
            raise InputError(f"{where}: unknown key {key!r}", hint=nearest(key, known))
