"""Options that several commands share, and the layer that puts flags on top of a run file.

`interlace plan` and `simulate` are asked in plain words too: --model and --sequence.
"""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, ArgumentCollection, Parameter, Token

from interlace.cli.run_file import load_run_config, preset_files
from interlace.config import RunConfig
from interlace.errors import InputError, nearest
from interlace.rules import check

_COMMANDS = ("plan", "simulate")
"""Those that take --model and --sequence."""
_SIZED = re.compile(r"(.+?)-(\d[\d.]*b(?:-.*)?)")
"""A family and a size: `llama-70b`."""

Verbose = Annotated[bool, Parameter(name=("--verbose", "-v"), negative="")]
"""Show where an error came from."""

RunFile = Annotated[str, Parameter(name="RUN")]
"""A TOML run file, or the name of a preset."""

RunOptions = Annotated[
    RunConfig,
    Parameter(name="*", name_transform=str, negative_iterable=()),
]
"""Every field of the run file as a flag, spelled as in the file."""


def read_run_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A cyclopts config layer: fill every field of RunConfig from the file and the flags.

    The values go back as they are (`implicit_value`), so that one place, `load_run_config`, says
    what a wrong value is for files and flags alike.
    """
    run = next(argument for argument in arguments if argument.name == "RUN")
    tables = {each.name for each in fields(RunConfig)}
    leaves = [
        argument
        for argument in arguments
        if argument.keys and argument.keys[0] in tables and not is_dataclass(argument.hint)
    ]
    if not run.tokens:
        return  # cyclopts says that RUN is missing
    overrides = {
        ".".join(leaf.keys): ",".join(_text(token) for token in leaf.tokens)
        for leaf in leaves
        if leaf.tokens
    }
    config = load_run_config(run.tokens[0].value, overrides)
    check(config)
    for leaf in leaves:
        value: object = config
        for key in leaf.keys:
            value = getattr(value, key)
        leaf.tokens[:] = [Token(keyword=leaf.name, implicit_value=value, source="run file")]


def _text(token: Token) -> str:
    """A token as it would be written; flags without a value carry True or False."""
    return (
        str(token.implicit_value).lower() if isinstance(token.implicit_value, bool) else token.value
    )


def in_words_of_run_files(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--model NAME` as the RUN that it stands for, and `--sequence N` as
    `--data.sequence_length N`; others as they are. Raises InputError for a model that is not known,
    and for a RUN beside it."""
    found = list(arguments)
    if not found or found[0] not in _COMMANDS:
        return found
    name, found = _taken(found, "--model")
    length, found = _taken(found, "--sequence")
    if length is not None:
        found += ["--data.sequence_length", length]
    if name is None:
        return found
    if len(found) > 1 and not found[1].startswith("-"):
        raise InputError(
            f"--model {name} and {found[1]} are both given, and each says what to train",
            hint=f"leave --model out; --model.layers and others change fields of {found[1]}",
        )
    return [found[0], _model(name), *found[1:]]


def _taken(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of an option, and the arguments without both."""
    for place, word in enumerate(arguments):
        if word == "--":
            break
        if word.startswith(f"{option}="):
            return word.partition("=")[2], arguments[:place] + arguments[place + 1 :]
        if word == option and place + 1 < len(arguments):
            return arguments[place + 1], arguments[:place] + arguments[place + 2 :]
    return None, arguments


def _model(name: str) -> str:
    """The preset of a model, or a file. Of a family and a size without a version the newest."""
    models = [each for each, file in preset_files().items() if file.parent.name == "models"]
    if name in models or Path(name).is_file():
        return name
    if sized := _SIZED.fullmatch(name):
        family, size = sized.groups()
        versions = re.compile(rf"{re.escape(family)}-[\d.]+-{re.escape(size)}")
        if alike := sorted(each for each in models if versions.fullmatch(each)):
            return alike[-1]
    raise InputError(f"there is no model {name!r}", hint=nearest(name, models))
