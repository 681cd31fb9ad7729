"""The documents as a site, `make site`, or python -m scripts.document_site; of the extra `site`.

The pages are written for the repository, where links may lead out of docs/. This module is a hook
of MkDocs, too: the README becomes the first page, and what pages link to outside of docs/ becomes a
file of the site, under source/. A link that leads nowhere is a warning, and all are counted.
"""

import importlib.util
import json
import logging
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from scripts import render_metrics, render_reference

ROOT: Final = Path(__file__).resolve().parents[1]
SITE: Final = ROOT / "dist" / "site"
_LINK: Final = re.compile(r"(\]\(|src=\")([^)\s\"#:]+)(#[^)\s\"]*)?(\)|\")")
_DOCS, _SOURCE, _INDEX = "docs", "source", "index.md"
_GENERATED: Final = {"reference.md": render_reference, "metrics.md": render_metrics}


class _Count(logging.Handler):
    """Prints and keeps the warnings of a build."""

    lines: Final[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        sys.stderr.write(f"{record.getMessage()}\n")


def main() -> int:
    """Build the site; print what it has as a line of JSON; return 1 if a link is broken."""
    if importlib.util.find_spec("mkdocs") is None:
        sys.stderr.write("MkDocs is not installed here: pip install 'vcpo[site]'\n")
        return 2
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    found = _Count(logging.WARNING)
    logging.getLogger("mkdocs").addHandler(found)
    build(load_config(str(ROOT / "mkdocs.yml")))
    sums = {"pages": len(list(SITE.rglob("index.html"))), "broken_links": len(found.lines)}
    sys.stdout.write(f"{json.dumps(sums)}\n")
    return int(bool(found.lines))


def on_files(files: Any, config: Any) -> Any:
    """Add the first page, and the files outside of docs/ that pages link to."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, _INDEX, content=_adapted(_readme(), "README.md")))
    pages = [page.src_uri for page in files.documentation_pages() if page.src_uri != _INDEX]
    for name, module in _GENERATED.items():
        files.append(File.generated(config, name, content=module.rendered_page()))
    texts = {f"{_DOCS}/{page}": (ROOT / _DOCS / page).read_text("utf-8") for page in pages}
    texts["README.md"] = _readme()
    for target in sorted({each for page in texts for each in outside(texts[page], page)}):
        path = ROOT / target
        if path.is_file():
            files.append(File.generated(config, _source(target), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page with links that lead to where the site has their targets."""
    own = page.file.src_uri
    return markdown if own in (_INDEX, *_GENERATED) else _adapted(markdown, f"{_DOCS}/{own}")


def outside(text: str, page: str) -> Iterator[str]:
    """Yield the paths outside of docs/ that a page links to, from the root of the repository.

    page: path of the page from there.
    """
    for found in _LINK.finditer(text):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), found[2]))
        if not target.startswith(f"{_DOCS}/") and target != _DOCS:
            yield target


def _adapted(text: str, page: str) -> str:
    """Return a page whose links lead to where the site has their targets.

    page: its path from the root of the repository.
    """
    here = posixpath.dirname(page.removeprefix(f"{_DOCS}/"))

    def adapt(found: re.Match[str]) -> str:
        before, link, anchor, after = found.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        place = _place(target)
        if place is None:
            return found[0]
        anchor = anchor if place.endswith(".md") and anchor else ""
        return f"{before}{posixpath.relpath(place, here or '.')}{anchor}{after}"

    return _LINK.sub(adapt, text)


def _place(target: str) -> str | None:
    """Return where the site has a file of the repository; None if it has none."""
    path = ROOT / target
    if target == "README.md":
        return _INDEX
    if target.startswith(f"{_DOCS}/"):
        inside = target.removeprefix(f"{_DOCS}/")
        pages = [path / "README.md", *sorted(path.glob("*.md"))] if path.is_dir() else []
        first = next((f"/{each.name}" for each in pages if each.is_file()), "")
        return f"{inside}{first}"
    if path.is_dir():  # the site has no listings
        return _INDEX
    return _source(target) if path.is_file() else None


def _source(target: str) -> str:
    """Return where the site has a file outside of docs/; a page is shown as it is written."""
    return f"{_SOURCE}/{target}.txt" if target.endswith(".md") else f"{_SOURCE}/{target}"


def _readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
