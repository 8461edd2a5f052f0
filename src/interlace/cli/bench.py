"""`interlace bench`: list the benches, or run one."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import Parameter

import interlace.bench
from interlace.cli.options import Verbose
from interlace.errors import InputError, nearest
from interlace.own_code import load_function

_COMMON = ("quick", "json_path")
"""Options that every bench takes."""
_EXPECTED = {int: "a whole number", float: "a number", str: "text"}
"""Types of options, in words for errors."""


def bench(
    name: str | None = None,
    /,
    *,
    json: Annotated[Path | None, Parameter(name="--json")] = None,
    quick: Annotated[bool, Parameter(negative="")] = False,
    verbose: Verbose = False,
    **options: str,
) -> int:
    """Measure one claim; without a name, list what there is.

    Parameters
    ----------
    name
        The bench to run, or a function of your own as `module:function`. `strands --cluster a800`
        runs `imagined`: two strands on this one device, as a rank of that cluster.
    json
        Also write the rows to this file.
    quick
        Fewer cases and repetitions, under a minute.
    verbose
        Show where an error came from.
    options
        Options of that bench; the list shows them.
    """
    known = bench_summaries()
    if name is None:
        for known_name, (summary, keys) in known.items():
            print(f"{known_name:12} {summary}")
            if keys:
                print(f"{'':12} options: {' '.join('--' + key for key in keys)}")
        return 0
    if name == "strands" and options.keys() & {"cluster", "world"}:
        name = "imagined"
    run = _find(name, known)
    values = _values(name, run, options)
    return run(quick=quick, json_path=json, **values) or 0


def _find(name: str, known: Iterable[str]) -> Callable[..., int]:
    """`run` of a bench of ours, or the function that `module:function` names. Raises InputError if
    there is none, or if it does not take what every bench is given."""
    if ":" not in name:
        if name not in known:
            hint = f"{nearest(name, known)} A bench of your own is 'module:function'."
            raise InputError(f"there is no bench {name!r}", hint=hint)
        return importlib.import_module(f"interlace.bench.{name}").run
    run = cast("Callable[..., int]", load_function(name, "bench"))
    missing = [key for key in _COMMON if key not in inspect.signature(run).parameters]
    if missing:
        raise InputError(
            f"bench {name!r} takes no {' and no '.join(missing)}",
            hint="write it as run(*, quick: bool, json_path: Path | None) -> int",
        )
    return run


def _values(name: str, run: Callable[..., int], options: Mapping[str, str]) -> dict[str, Any]:
    """Words of the command line as the types that `run` asks for."""
    wanted = inspect.signature(run, eval_str=True).parameters
    own = [key for key in wanted if key not in _COMMON]
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in own:
            raise InputError(
                f"bench {name} has no option --{key}",
                hint=nearest(key, [*own, "json", "quick", "verbose"]),
            )
        type_ = wanted[key].annotation
        if type_ not in _EXPECTED:
            raise InputError(
                f"bench {name}: option --{key} is not annotated as int, float or str",
                hint=f"as in {key}: int = 1",
            )
        try:
            values[key] = type_(text)
        except ValueError as error:
            raise InputError(
                f"--{key} {text} must be {_EXPECTED[type_]}",
                hint=f"as in --{key} {wanted[key].default}",
            ) from error
    return values


def bench_summaries() -> dict[str, tuple[str, tuple[str, ...]]]:
    """(first docstring line, own options) of every bench, by name. The modules are parsed, not
    imported."""
    summaries = {}
    for module in pkgutil.iter_modules(interlace.bench.__path__):
        source = Path(interlace.bench.__path__[0], f"{module.name}.py")
        if not source.is_file():
            continue
        tree = ast.parse(source.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "run":
                keys = (argument.arg for argument in node.args.kwonlyargs)
                own = tuple(key for key in keys if key not in _COMMON)
                summary = (ast.get_docstring(tree) or "").partition("\n")[0]
                summaries[module.name] = (summary, own)
    return summaries
