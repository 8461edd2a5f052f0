"""Every code block of README and docs does what it says: Python runs, files load, commands parse.

A block that cannot be run here has a comment `<!-- not run: REASON -->` before it. Its Python must
still compile and import what there is; its commands must still parse.
"""

import ast
import importlib
import os
import re
import subprocess
import tomllib
from pathlib import Path

import docs_several
import pytest
import torch
from docs_blocks import PAGES, ROOT, Block, blocks
from processes import run_ranks

from interlace.cli.app import build_app, run
from interlace.cli.bench import bench_summaries
from interlace.cli.options import in_words_of_run_files
from interlace.cli.run_file import load_run_config
from interlace.config import RunConfig
from interlace.degrees import resolve_layout
from interlace.hardware.cluster import load_cluster
from interlace.rules import check
from interlace.search.pipelines.units_file import read_units

SHELL = ("sh", "bash", "console")
NOT_RUN = {
    "docs/concepts/moe.md": [
        "needs two processes",
        "needs two processes",
        "needs a run under way",
        "ten minutes",
    ],
    "docs/concepts/stage-layouts.md": ["needs four processes"],
    "docs/concepts/pipelines.md": [
        "writes into docs/pictures",
        "needs two processes",
        "one minute",
        "needs two processes",
        "shows an error",
    ],
    "docs/concepts/searched-schedules.md": [
        "half a minute",
        "minutes",
        "needs two processes",
    ],
    "docs/guides/explain.md": ["needs two processes"],
    "docs/guides/images.md": ["needs four processes"],
    "docs/guides/lab.md": ["needs root"],
    "docs/guides/models.md": ["needs the weights of a model of 8 billion parameters"],
    "docs/guides/gpu.md": ["needs a GPU", "needs a GPU"],
    "docs/guides/one-gpu.md": ["needs a GPU"],
    "docs/concepts/recompute.md": ["takes longer than all other blocks together"],
}
LONGEST_S = 200


def of(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, *languages)]


def pages_with(*languages: str) -> list[str]:
    return [page for page in PAGES if blocks(page, *languages)]


def test_what_is_not_run_is_listed_here() -> None:
    """With its reason; and there is something to run."""
    found: dict[str, list[str]] = {}
    for block in of("python", "toml", *SHELL):
        if block.not_run:
            found.setdefault(block.page, []).append(block.not_run)
    assert found == NOT_RUN
    assert len(of("python")) > 15
    assert len(of("toml")) > 10
    assert len(of(*SHELL)) > 30


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs(page: str, tmp_path: Path) -> None:
    """The blocks of a page share their names; all of them run on one rank."""
    if page.endswith("torch-pipelining.md") and torch.__version__ >= (2, 15):
        pytest.skip("install_overlap is refused from torch 2.15 on, as the page says")
    todo = [block for block in blocks(page, "python") if not block.not_run]
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                missing = [each.name for each in node.names if not hasattr(module, each.name)]
                assert not missing, f"{block}: {node.module} has no {missing}"
    if todo:
        args = [page, str(tmp_path)]
        [result] = run_ranks("docs_world:run_page", 1, args=args, timeout_s=LONGEST_S)
        assert result.value == len(todo)


def test_the_worked_example_of_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On two ranks, with narrower layers: `explain` finds the collectives that the page shows, and
    says the same things about them."""
    page = "docs/guides/explain.md"
    args = [page, str(tmp_path), {"512": "32"}]
    run_ranks("docs_world:run_on_ranks", 2, args=args, timeout_s=LONGEST_S)
    assert run(["explain", str(tmp_path / "traces")]) == 0
    said = capsys.readouterr().out
    [shown] = [each.text for each in blocks(page, "text") if "all_reduce" in each.text]
    for line in (r"Rank \d, 2 steps, ProfilerStep#3 to ProfilerStep#4:", "Communication of a step"):
        assert re.search(line, said)
        assert re.search(line, shown)
    calls = r"(all_\w+) +default_pg +(\d+) +(\d+) "
    assert sorted(re.findall(calls, said)) == sorted(re.findall(calls, shown))
    for title in re.findall(r"^(?:collective|rank) .*", shown, re.MULTILINE):
        assert title.split() in [line.split() for line in said.splitlines()]


def test_blocks_of_several_ranks_run(tmp_path: Path) -> None:
    """On two ranks, one page after the other; those of four ranks with smaller meshes."""
    results = run_ranks("docs_several:run_pages", 2, args=[str(tmp_path)], timeout_s=LONGEST_S)
    several = [b.page for b in of("python") if b.not_run in docs_several.REASONS]
    for result in results:
        assert sorted(result.value) == sorted(set(several) - {"docs/guides/explain.md"})


def test_loops_clear_their_gradients() -> None:
    """A compiled step adds to `param.grad`, as autograd does: a loop that steps an optimizer and
    never clears trains on the sum of all gradients so far."""
    texts = {str(block): block.text for block in of("python")}
    examples = (ROOT / "examples").glob("*.py")
    texts |= {path.name: path.read_text(encoding="utf-8") for path in examples}
    loops = [
        (where, ast.unparse(node))
        for where, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.For) and "optimizer.step()" in ast.unparse(node)
    ]
    assert len(loops) > 5
    for where, loop in loops:
        assert "optimizer.zero_grad()" in loop, where


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_files_are_what_they_say(block: Block, tmp_path: Path) -> None:
    """A run file, a cluster file or a file of units, by the rules of the commands that read it."""
    file = tmp_path / "file.toml"
    file.write_text(block.text)
    if "intra_host" in tomllib.loads(block.text):
        assert load_cluster(str(file)).devices_per_host
    elif "unit" in tomllib.loads(block.text):
        assert read_units(file)
    else:
        check(load_run_config(str(file)))


@pytest.mark.parametrize("block", of(*SHELL), ids=str)
def test_shell_is_shell(block: Block) -> None:
    """bash can read it."""
    run = subprocess.run(
        ["bash", "-n"], input=block.script, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", pages_with(*SHELL))
def test_commands_exist_and_take_these_options(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line parses them; run.toml is the page's own run file, if it has one."""
    monkeypatch.chdir(tmp_path)
    own = [
        each.text
        for each in blocks(page, "toml")
        if not ("intra_host" in each.text or "[[unit]]" in each.text)
    ]
    general = [each.text for each in blocks("docs/guides/train.md", "toml")]
    Path("run.toml").write_text((own + general)[0])
    for block in blocks(page, *SHELL):
        for words in block.commands:
            check_command(words, str(block))


def check_command(words: list[str], where: str) -> None:
    program, *rest = words
    match program:
        case "interlace":
            check_interlace(rest, where)
        case "sudo":
            check_command(["interlace", *rest[1:]], where)
            assert rest[0] == "$(command -v interlace)", where  # sudo finds no virtual environment
        case "torchrun":
            check_torchrun(rest, where)
        case "srun":
            at = rest.index("interlace")
            tasks = rest[rest.index("--ntasks") + 1] if "--ntasks" in rest else None
            check_interlace(rest[at + 1 :], where, ranks=int(tasks) if tasks else None)
        case "python":
            assert rest[0] == "my_script.py" or (ROOT / rest[0]).is_file(), where
        case "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert rest[0] in targets, where
        case _:
            assert program in ("git", "pip", "export", "touch"), f"{where}: {words}"


def check_torchrun(words: list[str], where: str) -> None:
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(words)
    if given.training_script == "torchtitan.train":
        assert given.training_script_args[:2] == ["--module", "interlace.torchtitan"], where
    elif given.module:
        assert given.training_script == "interlace", where
        ranks = int(given.nproc_per_node) * int(given.nnodes.split(":")[-1])
        check_interlace(given.training_script_args, where, ranks=ranks)
    else:
        assert (ROOT / given.training_script).is_file(), where


def check_interlace(words: list[str], where: str, ranks: int | None = None) -> None:
    """Parsed as the command line does, with every check that comes before ranks start."""
    app = build_app()
    words = in_words_of_run_files(words)
    command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    given = bound.arguments
    if isinstance(given.get("config"), RunConfig) and words[0] != "plan":
        config = given["config"]
        ranks = ranks or given.get("nproc") or config.parallel.ranks
        resolve_layout(config, ranks)
    if words[0] == "bench" and ":" not in given.get("name", ":"):
        options = dict(given.get("options", {}))
        name = "imagined" if options.keys() & {"cluster", "world"} else given["name"]
        assert options.keys() <= set(bench_summaries()[name][1]), where
    if words[:2] == ["lab", "run"]:
        check_command(list(given["command"]), where)
    assert command is not None, where


def test_links_between_pages_lead_somewhere() -> None:
    """Files exist; what follows a # is a heading there."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("http"):
                continue
            name, _, heading = target.partition("#")
            file = (ROOT / page).parent / name if name else ROOT / page
            assert file.exists(), f"{page}: {target}"
            if heading:
                assert heading in _headings(file), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    """`graphs/lower.py` is in the package, `gloo/test_train.py` in the tests."""
    text = (ROOT / page).read_text(encoding="utf-8")
    names = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", text)
    places = (ROOT / "src" / "interlace", ROOT / "tests", ROOT, (ROOT / page).parent)
    gone = [name for name in names if not any((place / name).exists() for place in places)]
    assert gone == []


def test_every_page_is_in_the_index() -> None:
    """docs/README.md links to each page of its folder and to those at the top."""
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", text)}
    apart = {ROOT / "README.md", ROOT / "docs" / "README.md"}
    assert {ROOT / page for page in PAGES} - apart <= linked


def _headings(file: Path) -> set[str]:
    lines = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


FAKE = '#!/bin/sh\nprintf "%s\\n" "$0" "$@" | sed "1s,.*/,," > "$FAKE_ARGUMENTS"\n'


@pytest.mark.parametrize("script", ["examples/torchrun.sh", "examples/slurm/train.sbatch"])
def test_example_scripts_start_what_they_say(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run with launchers that only note their arguments: these are then parsed as the launcher and
    `interlace` do. The script's own examples are tried."""
    for launcher in ("torchrun", "srun"):
        (tmp_path / launcher).write_text(FAKE)
        (tmp_path / launcher).chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node0\n")
    (tmp_path / "scontrol").chmod(0o755)
    text = (ROOT / script).read_text(encoding="utf-8")
    examples = re.findall(rf"^#     (.*){re.escape(script)} (.*)$", text, re.MULTILINE)
    assert examples
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[parallel]\ndata_shard = 16\n")
    for before, arguments in examples:
        setting = dict(word.split("=") for word in before.split() if "=" in word)
        environment = {
            **os.environ, **setting, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]",
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "FAKE_ARGUMENTS": str(tmp_path / "words"),
        }  # fmt: skip
        command = ["bash", str(ROOT / script), *arguments.split()]
        subprocess.run(command, env=environment, check=True, cwd=tmp_path)
        words = (tmp_path / "words").read_text().splitlines()
        check_command(words, script)
    assert "not saved" not in text


def test_no_page_says_what_is_no_longer_so() -> None:
    """Sentences that were true once, and outlived it."""
    for page in PAGES:
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert "Weights are not saved" not in text, page
        assert "no model but Llama" not in text, page
