"""`python -m tools.size`: how large the project is, and how many files its two longest ways cross.

The last line is one JSON object. Lines are those of Python files, without generated ones; lines of
code are those with a token that is neither a comment nor a docstring. The files of the ways are
those that docs/architecture.md lists.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PRODUCT: Final = ("core", "operator", "learner_svc", "rollout_svc")
GENERATED: Final = ("core/vcpo/wire/v1",)
WAYS: Final = {
    "files_publish_to_swap": "## The files from publish to swap",
    "files_submit_to_update": "## The files from Submit to update",
}
"""Headings of docs/architecture.md, each over a list of files, by name in the result."""
_BLANK: Final = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def main() -> None:
    """Print the sizes."""
    result: dict[str, int] = {}
    for folder in PRODUCT:
        result[f"lines_{folder}"] = num_lines(ROOT / folder)
    result["lines_product"] = sum(result.values())
    result["code_product"] = sum(num_code_lines(ROOT / folder) for folder in PRODUCT)
    result["lines_tests"] = num_lines(ROOT / "tests")
    result["design_pages"] = len(list((ROOT / "docs" / "design").glob("[0-9]*.md")))
    page = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    result |= {name: len(files_below(page, heading)) for name, heading in WAYS.items()}
    for name, count in result.items():
        sys.stdout.write(f"{name:24}{count:>8,}\n")
    sys.stdout.write(json.dumps(result) + "\n")


def num_lines(folder: Path) -> int:
    """Return the lines of a folder's Python files."""
    return sum(len(_text(path).splitlines()) for path in _sources(folder))


def num_code_lines(folder: Path) -> int:
    """Return the lines of a folder's Python files that hold code."""
    return sum(len(code_lines(_text(path))) for path in _sources(folder))


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold more than blanks, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # A string that stands for itself: a docstring, also of a field.
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def files_below(page: str, heading: str) -> set[str]:
    """Return the Python files that a page links to between a heading and the next one.

    Raises:
        ValueError: if the page has no such heading.
    """
    _, found, rest = page.partition(f"\n{heading}\n")
    if not found:
        raise ValueError(f"docs/architecture.md has no heading {heading!r}")
    return set(re.findall(r"\]\(([^)\s]+\.py)\)", rest.partition("\n## ")[0]))


def _sources(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*.py"):
        if not path.relative_to(ROOT).as_posix().startswith(GENERATED):
            yield path


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
