"""Commands outside of code blocks: within sentences, and at the top of the examples."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from docs_blocks import PAGES, ROOT
from test_docs import check_command

from interlace.cli.app import build_app
from interlace.cli.bench import bench_summaries

PLACES = [*PAGES, "tests/README.md"]


def inline(program: str) -> list[tuple[str, list[str]]]:
    """(page, words after the program) of what stands in backquotes in a sentence."""
    found = []
    for page in PLACES:
        text = (ROOT / page).read_text(encoding="utf-8")
        text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for words in re.findall(rf"`{program} ([^`]+)`", text):
            found.append((page, words.split()))
    return found


def test_commands_in_sentences_exist() -> None:
    """Their first word is a command, that of a bench a bench, that of make a target."""
    commands = {*build_app(), "COMMAND"}
    named = inline("interlace")
    assert len(named) > 30
    for page, (command, *rest) in named:
        assert command in commands or command.startswith("-"), f"{page}: interlace {command}"
        if command == "bench" and rest and re.fullmatch("[a-z_]+", rest[0]):
            assert rest[0] in bench_summaries(), f"{page}: interlace bench {rest[0]}"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    for page, (target, *_) in inline("make"):
        assert target in targets, f"{page}: make {target}"


@pytest.mark.parametrize("example", sorted(each.name for each in (ROOT / "examples").glob("*.py")))
def test_commands_at_the_top_of_an_example_can_be_given(example: str) -> None:
    """Parsed as the launcher does; they start this example."""
    tree = ast.parse((ROOT / "examples" / example).read_text(encoding="utf-8"))
    lines = (ast.get_docstring(tree) or "").splitlines()
    commands = [line for line in lines if re.match(r" *(torchrun|python) ", line)]
    assert commands
    for line in commands:
        words = shlex.split(line, comments=True)
        assert f"examples/{example}" in words
        check_command(words, str(Path("examples", example)))
