"""A hook of MkDocs: makes of the files of GitHub what Python-Markdown and the site expect.

Pages at the top of the repository join those of docs/. A link to another file of the repository,
which the site does not have, becomes its text. A list may follow a line without a blank one.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
TOP = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_ITEM = re.compile(r"(?:[*-]|\d+\.) ")
_FENCE = re.compile(r" *```")


def on_files(files: Any, config: Any) -> Any:
    """The pages at the top are pages of the site."""
    for name in TOP:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page for the site."""
    uri = page.file.src_uri
    return with_blank_lines(with_site_links(markdown, uri if uri in TOP else f"docs/{uri}"))


def with_site_links(text: str, page: str) -> str:
    """Links as the site has them; `page` is where the text lies in the repository."""
    here = posixpath.dirname(site_path(page) or "")

    def link(found: re.Match[str]) -> str:
        target, mark, heading = found[2].partition("#")
        if not target or ":" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        there = site_path(path)
        if there is None:
            return found[1]
        return f"[{found[1]}]({posixpath.relpath(there, here or '.')}{mark}{heading})"

    return _LINK.sub(link, text)


def site_path(path: str) -> str | None:
    """Where the site has this file of the repository; None if it does not."""
    if path in TOP:
        return path
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def with_blank_lines(text: str) -> str:
    """A blank line before each list that follows a paragraph."""
    lines: list[str] = []
    fenced, before = False, ""
    for line in text.splitlines():
        fenced ^= bool(_FENCE.match(line))
        after_text = before.strip() and before[0] != " " and not _ITEM.match(before)
        if after_text and not fenced and _ITEM.match(line):
            lines.append("")
        lines.append(line)
        before = line
    return "\n".join(lines) + "\n"
