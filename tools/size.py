"""`python -m tools.size`: how large the project is; with `--check` against [tool.vcpo.size].

The last line is one JSON object. Lines are those of Python files, without generated ones. The files
of the two ways are those that docs/architecture.md lists. `--check` exits with 1 and names each
limit of pyproject.toml that is passed: whoever adds pays, or says in the commit why a limit moves.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import grimp
import networkx as nx

from vcpo.api import json_schema

ROOT: Final = Path(__file__).resolve().parents[1]
PRODUCT: Final = ("core", "operator", "learner_svc", "rollout_svc")
AROUND: Final = ("benchmarks", "research", "scripts", "tools")
PACKAGES: Final = ("vcpo", "vcpo_operator", "vcpo_rollout", "vcpo_learner")
GENERATED: Final = "core/vcpo/wire/v1/"
WAYS: Final = {
    "files_publish_to_swap": "## The files from publish to swap",
    "files_submit_to_update": "## The files from Submit to update",
}
"""Headings of docs/architecture.md, each over a list of files, by name in the result."""
_LONGEST: Final = 70


def main() -> int:
    """Print the sizes; with `--check` return 1 if a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a limit is passed")
    check: bool = parser.parse_args().check
    found = sizes()
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["vcpo"]["size"]
    for name, count in found.items():
        limit = f" of {limits[name]:,}" if name in limits else ""
        sys.stdout.write(f"{name:24}{count:>12,}{limit}\n")
    passed = {name: limit for name, limit in limits.items() if found[name] > limit}
    for name, limit in passed.items():
        sys.stderr.write(f"{name} is {found[name]:,}, and [tool.vcpo.size] allows {limit:,}\n")
    sys.stdout.write(json.dumps(found) + "\n")
    return int(check and bool(passed))


def sizes() -> dict[str, int]:
    """Return every size by its name."""
    command = ["git", "ls-files", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    tracked = [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in tracked
        if path.suffix == ".py"
    }
    lines = {
        top: sum(
            len(text.splitlines())
            for name, text in sources.items()
            if name.startswith(f"{top}/") and not name.startswith(GENERATED)
        )
        for top in (*PRODUCT, *AROUND, "tests")
    }
    product = [text for name, text in sources.items() if name.startswith(PRODUCT)]
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    architecture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    schema = json_schema()
    return {
        **{f"lines_{top}": lines[top] for top in PRODUCT},
        "lines_product": sum(lines[top] for top in PRODUCT),
        "lines_tests": lines["tests"],
        "files_tests": sum(name.startswith("tests/") for name in sources),
        "lines_around": sum(lines[top] for top in AROUND),
        "spec_fields": len(set(_fields(schema["properties"]["spec"], schema, ()))),
        "functions_over_70": sum(map(num_long_functions, product)),
        "import_circles": num_circles(),
        "pages": len(pages),
        "words": sum(len(page.split()) for page in pages),
        **{name: len(files_below(architecture, heading)) for name, heading in WAYS.items()},
        "tracked_files": len(tracked),
        "tracked_bytes": sum(path.stat().st_size for path in tracked),
    }


def num_long_functions(text: str) -> int:
    """Return how many functions of a module have more than 70 lines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))
    return sum((each.end_lineno or 0) - each.lineno + 1 > _LONGEST for each in functions)


def num_circles() -> int:
    """Return how many groups of the product's modules import each other in a circle."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    imports = nx.DiGraph(
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    return sum(len(each) > 1 for each in nx.strongly_connected_components(imports))


def files_below(page: str, heading: str) -> set[str]:
    """Return the Python files that a page links to between a heading and the next one.

    Raises:
        ValueError: if the page has no such heading.
    """
    _, found, rest = page.partition(f"\n{heading}\n")
    if not found:
        raise ValueError(f"docs/architecture.md has no heading {heading!r}")
    return set(re.findall(r"\]\(([^)\s]+\.py)\)", rest.partition("\n## ")[0]))


def _fields(
    node: Mapping[str, Any], schema: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Yield the path of each field of a schema that holds a value and no section."""
    while (name := str(node.get("$ref", "")).removeprefix("#/$defs/")) != "":
        node = schema["$defs"][name]
    choices = [each for each in node.get("anyOf", ()) if each.get("type") != "null"]
    if "properties" in node:
        for key, value in node["properties"].items():
            yield from _fields(value, schema, (*path, key))
    elif "items" in node:
        yield from _fields(node["items"], schema, path)
    elif len(choices) == 1:
        yield from _fields(choices[0], schema, path)
    else:
        yield path


if __name__ == "__main__":
    sys.exit(main())
