"""Code blocks of the documentation: fenced ones, and indented ones that begin with a command."""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FRONT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
PAGES = sorted((*FRONT, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))))
PROGRAMS = ("interlace", "sudo", "torchrun", "srun", "python", "pip", "make", "git", "export")
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
_FENCE = re.compile(r"( *)```(\w*)$")


@dataclass(frozen=True)
class Block:
    """One block; `not_run` is the reason in the comment before it, or empty."""

    page: str
    line: int
    language: str
    text: str
    not_run: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def script(self) -> str:
        """The commands of a shell block, without prompts and what they print."""
        if self.language != "console":
            return self.text
        lines = self.text.splitlines()
        return "\n".join(line[2:] for line in lines if line.startswith("$ "))

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command."""
        joined = self.script.replace("\\\n", " ")
        return [
            words for line in joined.splitlines() if (words := shlex.split(line, comments=True))
        ]


def blocks(page: str, *languages: str) -> list[Block]:
    """The blocks of a page in these languages, from top to bottom."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found, at, not_run = [], 0, ""
    while at < len(lines):
        start = at
        if fence := _FENCE.match(lines[at]):
            end = lines.index(f"{fence[1]}```", at + 1)
            language, body, at = fence[2], lines[at + 1 : end], end + 1
        elif lines[at].startswith("    ") and not lines[at - 1].strip():
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            body = lines[start:at]
            language = "sh" if body[0].split()[0] in PROGRAMS else "text"
        else:
            if lines[at].strip():
                marker = _NOT_RUN.fullmatch(lines[at].strip())
                not_run = marker[1] if marker else ""
            at += 1
            continue
        text = textwrap.dedent("\n".join(body)).strip("\n") + "\n"
        found.append(Block(page, start + 1, language, text, not_run))
        not_run = ""
    return [block for block in found if block.language in languages]
