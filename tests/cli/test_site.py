"""The site of the documentation: it builds without network, and its links lead somewhere."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import interlace
from interlace import reshard

ROOT = Path(__file__).resolve().parents[2]
LOADED = ("link", "script", "img", "iframe", "source")


class Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.remote: list[str] = []
        self.anchors = {"", "__top"}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[key] or "" for key in ("id", "name") if key in given}
        for key in ("href", "src"):
            target = given.get(key)
            if target is None:
                continue
            parts = urlsplit(target)
            if not parts.scheme and not parts.netloc:
                self.links.append(target)
            elif tag in LOADED and parts.scheme != "data" and given.get("rel") != "canonical":
                self.remote.append(target)


def test_the_site_is_whole(tmp_path: Path) -> None:
    """All files and anchors are there, nothing is loaded from elsewhere, and each public name has
    an entry."""
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {file.resolve(): Page(file) for file in site.rglob("*.html")}
    assert len(pages) > 50
    wrong = []
    for file, page in pages.items():
        wrong += [f"{file.name} loads {each}" for each in page.remote]
        if file.name != "404.html":  # served at any depth, so its links are absolute
            wrong += [
                f"{file.name}: {each}" for each in page.links if not _leads(each, file, pages)
            ]
    assert wrong == []
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8")
    anchors = {name.rpartition(".")[2] for page in pages.values() for name in page.anchors}
    assert {*interlace.__all__, *reshard.__all__} - {"__version__"} <= anchors


def _leads(link: str, file: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if target.is_dir():
        target /= "index.html"
    anchor = unquote(parts.fragment)
    return target.is_file() and (target not in pages or anchor in pages[target].anchors)
