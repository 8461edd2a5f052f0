"""`interlace bench`: list the benches, or run one."""

import ast
import importlib
import pkgutil
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import interlace.bench
from interlace.cli.options import Verbose
from interlace.errors import InputError, nearest


def bench(
    name: str | None = None,
    /,
    *,
    json: Annotated[Path | None, Parameter(name="--json")] = None,
    quick: Annotated[bool, Parameter(negative="")] = False,
    verbose: Verbose = False,
) -> int:
    """Measure one claim; without a name, list what there is.

    Parameters
    ----------
    name
        The bench to run.
    json
        Also write the rows to this file.
    quick
        Fewer cases and repetitions, under a minute.
    verbose
        Show where an error came from.
    """
    known = bench_summaries()
    if name is None:
        for known_name, summary in known.items():
            print(f"{known_name:12} {summary}")
        return 0
    if name not in known:
        raise InputError(f"there is no bench {name!r}", hint=nearest(name, known))
    module = importlib.import_module(f"interlace.bench.{name}")
    return module.run(quick=quick, json_path=json) or 0


def bench_summaries() -> dict[str, str]:
    """First docstring line of every bench, by name. The modules are parsed, not imported."""
    summaries = {}
    for module in pkgutil.iter_modules(interlace.bench.__path__):
        source = Path(interlace.bench.__path__[0], f"{module.name}.py")
        if not source.is_file():
            continue
        tree = ast.parse(source.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            summaries[module.name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return summaries
