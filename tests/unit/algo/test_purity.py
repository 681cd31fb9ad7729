import ast
from pathlib import Path

from vcpo import algo

SOURCES = sorted(Path(algo.__file__).parent.rglob("*.py"))
PURE = {
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "inspect",
    "itertools",
    "math",
    "statistics",
    "types",
    "typing",
    "vcpo",
}


def imported_roots(source: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in plain | named}


def test_the_mathematics_imports_nothing_but_plain_python() -> None:
    assert set().union(*map(imported_roots, SOURCES)) <= PURE
