"""The structure that the design promises: where private APIs live, how long files are."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import grimp
import pytest

from interlace.schedules.finder import names

SOURCE = Path(__file__).parents[2] / "src" / "interlace"
FILES = sorted(SOURCE.rglob("*.py"))
PRIVATE_HOME = SOURCE / "graphs" / "torch_private.py"
LONGEST_FILE = 400
LONGEST_FUNCTION = 70
PRIVATE_ATTRIBUTES = {
    "": {"_schema"},  # what an operator takes and gives
    "graphs/capture_settings.py": {"_parameters", "_buffers"},
    "graphs/fsdp_private.py": None,
    "graphs/torch_private.py": None,
    "hf_trainer.py": {"_hf_hook", "_prepare_inputs"},  # of accelerate and transformers
    "lab/": {"_register_backend", "_set_default_backend"},
    "parallel/local_parts.py": {"_parameters"},
    "parallel/plans.py": {"_tp_plan"},  # of transformers
    "parallel/published_experts.py": {"_ep_plan"},
    "pipelining/": {  # of PyTorch's runtime; `overlap_checks` refuses one that has them not
        "_check_inputs", "_comp_type_to_function_map", "_has_backward", "_initialize_stages",
        "_internal_losses", "_loss_fn", "_maybe_compute_loss", "_stage_meta", "_stages",
        "_step_microbatches",
    },
    "ranks/process_group.py": {"_hash_ranks_to_str", "_world"},  # by what torch names groups
    "torchtitan.py": {"_owner"},
    "train/fake_depth.py": {"_parameters", "_buffers", "_modules"},
}  # fmt: skip
"""Private attributes of objects that are not ours, by file or folder; None for any."""
_PUBLIC = {"_exit", "_fields", "_replace", "_run_exitfuncs"}
"""Of Python's `os` and of named tuples, which document them, and of `atexit`."""
_OPERATORS = re.compile(r"(torch\.ops|aten|_c10d_functional)\b")
"""Finds an expression for a namespace of operators, whose names are those of a graph."""
ASKED_FOR_LATE = {("interlace", f"interlace.{name}") for name in ("api", "reshard", "shaped_steps")}
"""Public names, imported when they are first asked for."""


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_torch_lives_in_one_module(path: Path) -> None:
    """No other module imports an underscore name of torch, or torch.testing."""
    names = [name for name in _imports(_tree(path)) if name.startswith("torch.")]
    private = [name for name in names if re.search(r"\._|^torch\.testing", name)]
    assert path == PRIVATE_HOME or not private


def _defined(tree: ast.AST) -> set[str]:
    """Names of functions, classes, fields and attributes of `self` that a file sets."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            for each in ast.walk(target) if isinstance(target, ast.AST) else ():
                if isinstance(each, ast.Name):
                    found.add(each.id)
                elif isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
                    found.add(each.attr)
    return found


def _private_attributes(tree: ast.AST, ours: set[str]) -> set[str]:
    """Names that begin with one underscore and that are read from, or set on, other objects. Those
    of `self` may come from a class of `ours`."""
    here, found = _defined(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, name = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "hasattr",
            "setattr",
        ):
            base, name = ast.unparse(node.args[0]), str(getattr(node.args[1], "value", ""))
        else:
            continue
        known = ours if base in ("self", "cls") else here
        if re.match(r"_[^_]", name) and name not in known | _PUBLIC:
            found |= set() if _OPERATORS.match(base) else {name}
    return found


def test_private_attributes_of_others_are_listed() -> None:
    """What is not imported by a private name can still be read by one."""
    trees = {file: _tree(file) for file in FILES}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    seen: dict[str, set[str]] = {where: set() for where in PRIVATE_ATTRIBUTES}
    for file, tree in trees.items():
        name = file.relative_to(SOURCE).as_posix()
        places = [where for where in PRIVATE_ATTRIBUTES if name.startswith(where)]
        if any(PRIVATE_ATTRIBUTES[where] is None for where in places):
            continue
        for attribute in _private_attributes(tree, ours):
            listed = [where for where in places if attribute in (PRIVATE_ATTRIBUTES[where] or ())]
            assert listed, f"{name}: {attribute}"
            seen[listed[0]].add(attribute)
    assert seen == {where: names or set() for where, names in PRIVATE_ATTRIBUTES.items()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    """One idea each."""
    assert path.read_text().count("\n") <= LONGEST_FILE
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"


def test_no_function_level_mutable_globals() -> None:
    """Modules hold no `global` statement."""
    for path in FILES:
        nodes = ast.walk(_tree(path))
        assert not any(isinstance(node, ast.Global) for node in nodes), path


@cache
def _imports_of_files() -> grimp.ImportGraph:
    return grimp.build_graph("interlace", cache_dir=None)


def _packages() -> list[str]:
    return sorted({file.parent.relative_to(SOURCE.parent).as_posix() for file in FILES})


@pytest.mark.parametrize("package", _packages())
def test_no_cycle_among_the_files_and_packages_of_a_package(package: str) -> None:
    """A package within stands for all its files; imports for types alone count as well. So there
    is no cycle of files either: it would be one in the innermost package that holds it."""
    graph, name = _imports_of_files(), package.replace("/", ".")
    depth = name.count(".") + 2
    needs: dict[str, set[str]] = {}
    for importer in graph.find_descendants(name):
        for imported in graph.find_modules_directly_imported_by(importer):
            pair = (".".join(importer.split(".")[:depth]), ".".join(imported.split(".")[:depth]))
            ours = imported.startswith(f"{name}.") and pair[0] != pair[1]
            if ours:
                needs.setdefault(pair[0], set()).add(pair[1])
                needs.setdefault(pair[1], set())
    while free := {each for each, needed in needs.items() if not needed}:
        needs = {each: needed - free for each, needed in needs.items() if each not in free}
    assert not needs, f"these import each other, or what does: {needs}"


def test_only_public_names_are_imported_from_the_top() -> None:
    """The package itself imports what users ask for, and nothing else."""
    found = _imports_of_files().find_modules_directly_imported_by("interlace")
    assert {("interlace", each) for each in found} == ASKED_FOR_LATE


@pytest.mark.parametrize("package", _packages())
def test_a_package_lists_its_files(package: str) -> None:
    """One line for each file and each package in it, `name.py  what it is for`, and no others."""
    folder = SOURCE.parent / package
    files = {file.name for file in folder.glob("*.py") if file.name != "__init__.py"}
    packages = {f"{inner.parent.name}/" for inner in folder.glob("*/__init__.py")}
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = re.findall(r"^(\w+(?:\.py|/)) {2,}\S", text, flags=re.MULTILINE)
    assert len(listed) == len(set(listed)), "one line is enough"
    assert set(listed) == files | packages


def test_the_walk_names_files_that_there_are_and_counts_them() -> None:
    """A page that sends a newcomer to a file that has moved is worse than none."""
    page = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text()
    walk = page[page.index("## One step") : page.index("## Other ways in")]
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", page))
    assert not {name for name in named if not (SOURCE / name).is_file()}
    files = set(re.findall(r"`((?:\w+/)*\w+\.py)`", walk))
    packages = {name.split("/")[0] for name in files}
    assert f"name {len(files)} files in {len(packages)} packages" in " ".join(walk.split())


def test_the_map_has_the_packages_in_the_order_of_their_contract() -> None:
    """From the top down; what is in one layer may have several lines."""
    root = SOURCE.parents[1]
    page = (root / "ARCHITECTURE.md").read_text()
    table = page[page.index("## The map") : page.index("## Rules that hold")]
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`[^|]*) \|", table, re.M)]
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [layer.split(" | ") for layer in contracts["contracts"][0]["layers"]]
    layer_of = {name: number for number, layer in enumerate(layers) for name in layer}
    shown = [name for row in rows for name in row]
    assert sorted(shown) == sorted(layer_of)
    assert [layer_of[name] for name in shown] == sorted(layer_of.values())


def test_no_two_files_have_one_name() -> None:
    """A name says where to look. `__init__.py` alone is in every package."""
    twice = [name for name, count in Counter(file.name for file in FILES).items() if count > 1]
    assert twice == ["__init__.py"]


def test_examples_and_tests_have_modules_of_unlike_names() -> None:
    """Tests import some examples, and files run in one process in any order: the first of two
    modules of one name would hide the other."""
    root = SOURCE.parents[1]
    files = [*(root / "examples").glob("*.py"), *(root / "tests").rglob("*.py")]
    counted = Counter(file.stem for file in files)
    assert {name for name, count in counted.items() if count > 1} == {"conftest"}


def test_no_two_public_types_have_one_name() -> None:
    """Classes, and aliases as `Batch = tuple[Tensor, ...]`. Our models call their layers as the
    field does, each in its own file."""
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in _tree(file).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            names += [ast.unparse(target) for target in getattr(node, "targets", ())]
            for name in names:
                if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                    places.setdefault(name, []).append(file.stem)
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert all(set(files) == {"llama", "gpt"} for files in twice.values()), twice


def _texts(node: ast.expr, constants: Mapping[str, ast.expr]) -> set[str]:
    """The strings in an expression, with those of the constants that it names."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            found.add(each.value)
        elif isinstance(each, ast.Name) and each.id in constants:
            found |= _texts(constants[each.id], {})
    return found


def test_nothing_is_decided_by_the_name_of_a_schedule() -> None:
    """A run file may call a schedule otherwise, and a user's own has a name that nobody knows. What
    a schedule does is in its actions and in what it declares (`schedules/declared.py`)."""
    wrong = []
    for file in FILES:
        if file.parent.name in ("schedules", "bench"):  # benches name what they measure
            continue
        tree = _tree(file)
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        wrong += [
            f"{file.relative_to(SOURCE)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Compare)
            for side in (node.left, *node.comparators)
            if _texts(side, constants) & set(names())
        ]
    assert not wrong


def test_type_checkers_are_told_that_the_package_has_types() -> None:
    """PEP 561: an empty file, which lies in the package and so in the wheel."""
    assert (SOURCE / "py.typed").read_bytes() == b""
