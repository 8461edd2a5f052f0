"""Plain words for what `interlace plan` and `simulate` are asked: --model and --sequence."""

import re
from collections.abc import Sequence
from pathlib import Path

from interlace.cli.run_file import preset_files
from interlace.errors import InputError, nearest

_COMMANDS = ("plan", "simulate")
_SIZED = re.compile(r"(.+?)-(\d[\d.]*b(?:-.*)?)")
"""A family and a size: `llama-70b`."""


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
