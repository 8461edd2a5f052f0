"""Help of commands that take a run file: a panel for each of its tables, and all presets."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel

from interlace.cli.run_file import preset_files

_OPTIONS = "Parameters"
"""Title of the panel in which cyclopts shows all options."""

_TRAINED = ("quickstart", "moe-quickstart", "demo")
"""Presets that a laptop trains in minutes."""
_SMALL, _SHAPES = "to try", "to plan"
"""How the help calls those presets, and the others."""


class PanelsByTable(DefaultFormatter):
    """Options of a command first, then those of each table of the run file in a panel of its own.

    cyclopts would show two hundred of them in one."""

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        """Show a panel, or the panels that it is taken apart into."""
        for part in by_table(panel):
            super().__call__(console, options, part)


def by_table(panel: HelpPanel) -> Iterable[HelpPanel]:
    """The panels of a panel of options; any other as it is. Keys of a run file that stand outside
    its tables are options of the command."""
    if panel.title != _OPTIONS:
        takes_run_file = any("RUN" in (entry.positional_label or "") for entry in panel.entries)
        return [panel, _presets(panel)] if takes_run_file else [panel]
    order = {table: n for n, table in enumerate(dict.fromkeys(map(_table, panel.entries)))}
    order[""] = -1
    entries = sorted(panel.entries, key=lambda entry: order[_table(entry)])
    return [
        panel.copy(title=f"Run file: {table}" if table else _OPTIONS, entries=list(members))
        for table, members in groupby(entries, key=_table)
    ]


def _presets(panel: HelpPanel) -> HelpPanel:
    """The names that may stand for a run file: those that train as they are, and all others."""
    names = set(preset_files()).difference(_TRAINED)
    entries = [
        HelpEntry(positional_label=_SMALL, description=", ".join(_TRAINED)),
        HelpEntry(positional_label=_SHAPES, description=", ".join(sorted(names))),
    ]
    return panel.copy(title="Presets", entries=entries)


def _table(entry: HelpEntry) -> str:
    """`model` of `--model.layers`, and `model.experts` of `--model.experts.count`."""
    name = next(iter(entry.names), "").removeprefix("--")
    return name.rpartition(".")[0]
