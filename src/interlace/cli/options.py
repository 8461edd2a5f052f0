"""Options that several commands share, and the layer that puts flags on top of a run file."""

from dataclasses import is_dataclass
from typing import Annotated

from cyclopts import App, ArgumentCollection, Parameter, Token

from interlace.cli.run_file import load_run_config
from interlace.config import RunConfig
from interlace.rules import check

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
    leaves = [
        argument for argument in arguments if argument.keys and not is_dataclass(argument.hint)
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
