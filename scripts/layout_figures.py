"""Write the figures of the tree's layout to ``docs/layout.json``; with ``--check`` only compare.

Per package:

- ``largest_folder``: number of Python files in the folder that holds most of them, subfolders and
  generated stubs aside; ``largest_folder_path`` names it.
- ``private_functions``: functions and methods whose name begins with one underscore. Functions
  inside functions count; names that begin with two underscores do not.
- ``one_caller``: those of them that the package references exactly once. A reference is a name
  or an attribute in the syntax tree that equals the function's name; the ``def`` and an import
  are none. Names are compared within the package, so two functions of one name share their
  references. ``one_caller_share`` is the quotient.
- ``one_caller_share_in_module``: the same, with references counted in the function's module only.
- ``product_lines``: lines of Python files, generated stubs aside.
- ``test_lines``: lines of the Python files below ``tests/`` that import this package more often
  than any other; a file that imports none of them counts for no package.

For the tree: ``one_caller_share`` is that of all product packages together. ``spec_fields`` is the
number of values that a run file can set below ``spec``, lists and maps counted once.
``step_scalar_places`` is explained at `step_scalar_places`.

``bars`` are the largest figures that a product package, or the tree, should have; ``over_bar``
names the figures above them.

Lines, shares and folders change with nearly every commit. ``--check`` therefore compares lines to
within 5 %, shares to within 0.02 and numbers of files to within 2, and everything else exactly. A
figure that passes its bar fails the check, because ``over_bar`` may not gain a name.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from vcpo.spec.run import VCPORunSpec

ROOT: Final = Path(__file__).resolve().parent.parent
FIGURES: Final = ROOT / "docs" / "layout.json"

PACKAGES: Final = {
    "vcpo": "core/vcpo",
    "vcpo_operator": "operator/vcpo_operator",
    "vcpo_rollout": "rollout_svc/vcpo_rollout",
    "vcpo_learner": "learner_svc/vcpo_learner",
    "vcpo_study": "study/vcpo_study",
    "vcpo_monitoring": "monitoring/vcpo_monitoring",
    "benchmarks": "benchmarks",
}
BARS: Final = {"largest_folder": 15, "one_caller_share": 0.50, "step_scalar_places": 3}
"""Largest figure that a product package, or the tree, should have."""

WITHOUT_BARS: Final = {"benchmarks", "tests"}

STEP_SCALAR: Final = "surprisal_nats"
"""The step scalar whose places are counted."""

LINES_TOLERANCE: Final = 0.05
SHARE_TOLERANCE: Final = 0.02
FILES_TOLERANCE: Final = 2

Figures = dict[str, "int | float | str"]


def sources(folder: Path) -> list[Path]:
    """Python files below `folder` that a person wrote, sorted."""
    return sorted(path for path in folder.rglob("*.py") if "_pb2" not in path.name)


def num_lines(paths: list[Path]) -> int:
    """Lines of all files together, empty ones included."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def largest_folder(paths: list[Path]) -> tuple[str, int]:
    """The folder with most of the files directly in it, relative to the root, and their number."""
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in paths)
    return min(counts.items(), key=lambda item: (-item[1], item[0]))


def references(tree: ast.Module) -> Counter[str]:
    """How often each name or attribute occurs in an expression of the module."""
    names = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    attributes = (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return Counter((*names, *attributes))


def private_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods whose name begins with exactly one underscore."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if node.name.startswith("_") and not node.name.startswith("__"):
            yield node


def caller_figures(paths: list[Path]) -> Figures:
    """Number of private functions of a package, and how many of them have one caller."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    in_module = [references(tree) for tree in trees]
    in_package = sum(in_module, Counter[str]())
    names = [
        (node.name, index) for index, tree in enumerate(trees) for node in private_functions(tree)
    ]
    one = sum(in_package[name] == 1 for name, _ in names)
    one_in_module = sum(in_module[index][name] == 1 for name, index in names)
    total = max(1, len(names))
    return {
        "private_functions": len(names),
        "one_caller": one,
        "one_caller_share": round(one / total, 2),
        "one_caller_share_in_module": round(one_in_module / total, 2),
    }


def short_one_caller(folder: Path, longest: int = 4) -> Iterator[tuple[Path, int, str]]:
    """File, line and name of private functions with one caller and at most `longest` lines.

    Lines are those of the body without its docstring.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources(folder)}
    counts = sum((references(tree) for tree in trees.values()), Counter[str]())
    for path, tree in trees.items():
        for node in private_functions(tree):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body and body[-1].end_lineno else 0
            if counts[node.name] == 1 and lines <= longest:
                yield path, node.lineno, node.name


def tested_package(path: Path) -> str | None:
    """The package that a test file imports most often, or None."""
    counts: Counter[str] = Counter()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            counts[node.module.partition(".")[0]] += 1
        elif isinstance(node, ast.Import):
            counts.update(alias.name.partition(".")[0] for alias in node.names)
    ours = [(counts[name], name) for name in PACKAGES if counts[name]]
    # The core serves every test, so it gives way to the package that it serves.
    others = [each for each in ours if each[1] != "vcpo"]
    return max(others or ours, default=(0, None))[1]


def spec_fields(model: type[BaseModel] = VCPORunSpec) -> int:
    """Number of values that a run file can set in `model` and the models inside it."""
    total = 0
    for field in model.model_fields.values():
        inner = list(models_in(field.annotation))
        total += sum(spec_fields(each) for each in inner) if inner else 1
    return total


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Models that a field's annotation holds, through unions, lists and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def step_scalar_places(name: str = STEP_SCALAR) -> int:
    """Number of Python files, tests included, in which the step scalar `name` stands as a word.

    A step scalar is declared once, in `vcpo.records.step_record`; metrics, signals, journal, report
    and study read that module's tables. What remains is where it is computed, where it is declared
    and where it is tested.
    """
    word = re.compile(rf"\b{name}\b")
    folders = ("core", "operator", "rollout_svc", "learner_svc", "study", "benchmarks", "tests")
    return sum(
        word.search(path.read_text(encoding="utf-8")) is not None
        for folder in folders
        for path in sources(ROOT / folder)
    )


def measure() -> dict[str, object]:
    """All figures of the tree as it is."""
    tests = {path: tested_package(path) for path in sources(ROOT / "tests")}
    packages: dict[str, Figures] = {}
    for name, folder in PACKAGES.items():
        paths = sources(ROOT / folder)
        largest, count = largest_folder(paths)
        packages[name] = {
            "largest_folder": count,
            "largest_folder_path": largest,
            **caller_figures(paths),
            "product_lines": num_lines(paths),
            "test_lines": num_lines([path for path, tested in tests.items() if tested == name]),
        }
    largest, count = largest_folder(list(tests))
    packages["tests"] = {
        "largest_folder": count,
        "largest_folder_path": largest,
        **caller_figures(list(tests)),
        "test_lines": num_lines(list(tests)),
    }
    product = [packages[name] for name in PACKAGES if name not in WITHOUT_BARS]
    one_caller, private = (
        sum(int(figures[key]) for figures in product) for key in ("one_caller", "private_functions")
    )
    figures: dict[str, object] = {
        "packages": packages,
        "one_caller_share": round(one_caller / private, 2),
        "spec_fields": spec_fields(),
        "step_scalar_places": step_scalar_places(),
    }
    return {**figures, "bars": BARS, "over_bar": over_bar(figures)}


def over_bar(figures: dict[str, object]) -> list[str]:
    """Dotted names of the figures that are larger than their bar."""
    return [
        name
        for name, value in flattened(figures)
        if isinstance(value, (int, float))
        and value > BARS.get(name.rpartition(".")[2], value)
        and not WITHOUT_BARS & set(name.split("."))
    ]


def flattened(figures: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every single figure with its dotted path."""
    if isinstance(figures, dict):
        for key, value in figures.items():
            yield from flattened(value, f"{path}.{key}" if path else key)
    else:
        yield path, figures


def has_drifted(name: str, recorded: object, measured: object) -> bool:
    """Whether a figure differs by more than its kind is allowed to; see the module's docstring."""
    if isinstance(recorded, (int, float)) and isinstance(measured, (int, float)):
        key = name.rpartition(".")[2]
        if key.endswith("_lines"):
            return abs(measured - recorded) > LINES_TOLERANCE * recorded
        if "_share" in key:
            return abs(measured - recorded) > SHARE_TOLERANCE + 1e-9
        if key == "largest_folder":
            return abs(measured - recorded) > FILES_TOLERANCE
        if key in {"private_functions", "one_caller"}:
            # Their quotient is compared.
            return False
    if isinstance(recorded, list) and isinstance(measured, list):
        return not set(measured) <= set(recorded)
    return recorded != measured and not name.endswith("_path")


def drift(recorded: object, measured: object) -> list[str]:
    """Sentences about the figures that have drifted."""
    before, now = dict(flattened(recorded)), dict(flattened(measured))
    return [
        f"{name}: {before.get(name)} in docs/layout.json, {now.get(name)} in the tree"
        for name in sorted(before.keys() | now.keys())
        if has_drifted(name, before.get(name), now.get(name))
    ]


def main() -> int:
    """Write or check; the exit status is 1 when a figure has drifted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on drift")
    parser.add_argument(
        "--list", action="store_true", help="print short private functions with one caller"
    )
    arguments = parser.parse_args()
    if arguments.list:
        for folder in PACKAGES.values():
            for path, line, name in short_one_caller(ROOT / folder):
                sys.stdout.write(f"{path.relative_to(ROOT)}:{line} {name}\n")
        return 0
    figures = measure()
    if not arguments.check:
        FIGURES.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        return 0
    found = drift(json.loads(FIGURES.read_text(encoding="utf-8")), figures)
    for problem in found:
        sys.stderr.write(f"{problem}\n")
    if found:
        sys.stderr.write("Cure: python scripts/layout_figures.py, and look at what it changes\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
