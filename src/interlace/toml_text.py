"""TOML files that people write: read whole, with errors and places that name the line."""

import re
import tomllib
from pathlib import Path
from typing import Any

from interlace.errors import InputError


def read_toml(file: Path) -> tuple[dict[str, Any], str]:
    """The parsed file, and its text. Raises InputError that names the file and the line."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text", hint="save it as UTF-8") from error
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        raise _wrong_line(file, text, str(error)) from error


def place_of(file: str, text: str, name: str) -> str:
    """`file, line 3`, the line that gives the key or the table `name`, written with dots as in
    `link.rate`; `file` alone where no line does."""
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            table = header[1]
            given = table
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            given = f"{table}.{key[1]}" if table else key[1]
        else:
            continue
        if given == name:
            return f"{file}, line {number}"
    return file


def _wrong_line(file: Path, text: str, reason: str) -> InputError:
    """tomllib says `reason (at line 3, column 5)`; show that line, and name the repeated key."""
    found = re.search(r" \(at line (\d+), column \d+\)$", reason)
    number = int(found[1]) if found else len(text.splitlines())
    line = (text.splitlines() or [""])[min(number, len(text.splitlines())) - 1].strip()
    what = reason[: found.start()] if found else reason.replace(" (at end of document)", "")
    hint = "text needs quotes, and a table starts with [name]"
    if what.startswith(("Cannot overwrite", "Cannot declare")):
        what, hint = "this key or table was given before", "remove one of the two"
    return InputError(f"{file}, line {number}: {what}: {line}", hint=hint)
