"""Guards of the tree: files that must exist or must not, and imports that must not happen."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import vcpo
import vcpo_learner
import vcpo_operator
import vcpo_rollout
from vcpo.metrics.catalogue import ALL
from vcpo.metrics.metric import MetricKind

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"runs", "dist", "__pycache__"}
HEAVY = ("torch", "transformers", "vllm", "numpy", "safetensors")
SHARED = ("tests.fixtures", "tests.fakes")
USERS_OF_TESTS = [ROOT / each for each in ("tests", "benchmarks", "examples", "scripts")]
PACKAGES = (vcpo, vcpo_operator, vcpo_rollout, vcpo_learner)

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
for name in sys.argv[1].split():
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        importlib.import_module(module.name)
print(*sorted(sys.modules))
"""


def files() -> Iterator[Path]:
    """Every file of the tree that a person wrote; hidden folders and outputs aside."""
    for top in ROOT.iterdir():
        if top.name.startswith(".") or top.name in GENERATED:
            continue
        for path in [top] if top.is_file() else top.rglob("*"):
            if path.is_file() and not GENERATED & set(path.parts):
                yield path


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


def folder_table() -> list[str]:
    """The folders that docs/architecture.md's last table has a row for."""
    lines = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()
    rows = lines[lines.index("| folder | what it holds | runs in |") + 2 :]
    return [row.split("`")[1] for row in rows if row.startswith("|")]


def product_folders() -> set[str]:
    """Folders of the packages with a module beside `__init__.py`; generated stubs aside."""
    modules = [
        path
        for package in PACKAGES
        for path in Path(*package.__path__).rglob("*.py")
        if path.name != "__init__.py" and "_pb2" not in path.name
    ]
    return {path.parent.relative_to(ROOT).as_posix() for path in modules}


def foreign_imports(path: Path, source: str) -> list[str]:
    """Modules below `tests` that a file imports and must not.

    Allowed are `tests.fakes`; for other than fakes `tests.fixtures`; and helpers, neither tests nor
    conftests, in the file's own folder or one above it.
    """
    shared = ("tests.fakes",) if path.is_relative_to("tests/fakes") else SHARED
    return [
        module
        for module in sorted(set(imported_modules(ast.parse(source))))
        if not f"{module}.".startswith(tuple(f"{each}." for each in shared))
        and not is_own_helper(path, module)
    ]


def imported_modules(tree: ast.Module) -> Iterable[str]:
    """Dotted names below `tests`, as deep as the files go."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("tests."))
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("tests."):
            yield from (as_module(f"{node.module}", each.name) for each in node.names)


def as_module(package: str, name: str) -> str:
    """What `from package import name` loads: the name where the package is a folder of tests."""
    return f"{package}.{name}" if (ROOT / package.replace(".", "/")).is_dir() else package


def is_own_helper(path: Path, module: str) -> bool:
    folder, _, name = module.rpartition(".")
    own = path.is_relative_to(folder.replace(".", "/"))
    return own and name != "conftest" and not name.startswith("test_")


def metric_names() -> set[str]:
    """Names as they are queried, those of a histogram's parts included."""
    histograms = [metric.name for metric in ALL if metric.kind is MetricKind.HISTOGRAM]
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    return {metric.name for metric in ALL} | parts


def test_no_file_has_the_marks_of_an_unfinished_merge():
    marks = re.compile(rb"^(<{7}|>{7}) ", re.MULTILINE)
    offenders = [
        str(path.relative_to(ROOT))
        for path in files()
        if "node_modules" not in path.parts and marks.search(path.read_bytes())
    ]
    assert offenders == []


def test_nothing_shadows_the_operator_module_of_python():
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert (ROOT / "operator" / "vcpo_operator" / "__init__.py").exists()


def test_tests_are_no_package():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_no_suite_imports_the_files_of_another():
    modules = [
        (path.relative_to(ROOT), path) for top in USERS_OF_TESTS for path in top.rglob("*.py")
    ]
    offenders = [
        f"{name}: {module}"
        for name, path in sorted(modules)
        for module in foreign_imports(name, path.read_text(encoding="utf-8"))
    ]
    assert offenders == []


@pytest.mark.parametrize(
    ("path", "imported", "is_foreign"),
    [
        ("tests/unit/wire/test_guard.py", "tests.unit.wire.test_server", True),
        ("tests/unit/local/test_fleet.py", "tests.unit.local.conftest", True),
        ("tests/unit/research/test_pool.py", "tests.unit.rollout.versions", True),
        ("tests/unit/test_journal.py", "tests.unit.wire.payloads", True),
        ("tests/fixtures/records.py", "tests.unit.wire.payloads", True),
        ("tests/fakes/kubernetes/api.py", "tests.fixtures.kubernetes.client", True),
        ("benchmarks/learner/packing.py", "tests.e2e.cluster", True),
        ("benchmarks/learner/packing.py", "tests.fakes.kubernetes.api", False),
        ("tests/unit/wire/test_weights.py", "tests.unit.wire.payloads", False),
        ("tests/unit/wire/v1/test_weights.py", "tests.unit.wire.payloads", False),
        ("tests/fixtures/records.py", "tests.fakes.clock", False),
        ("tests/fakes/kubernetes/api.py", "tests.fakes.kubernetes.store", False),
    ],
)
def test_a_suite_may_import_its_own_helpers_fixtures_and_fakes(path, imported, is_foreign):
    package, _, module = imported.rpartition(".")
    for source in (
        f"from {imported} import x",
        f"import {imported}",
        f"from {package} import {module}",
    ):
        assert bool(foreign_imports(Path(path), source)) is is_foreign


def test_core_and_operator_load_nothing_heavy():
    # In a fresh interpreter, since this one may have loaded anything.
    command = [sys.executable, "-c", IMPORT_EVERYTHING, "vcpo vcpo_operator"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"vcpo.cli.main", "vcpo.wire.server", "vcpo_operator"} <= set(loaded)
    assert [name for name in HEAVY if name in loaded] == []


def test_the_stubs_are_those_of_the_protocol():
    command = [sys.executable, str(ROOT / "scripts" / "generate_stubs.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_what_a_package_offers_can_be_imported(package):
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    names = [package.__name__, *(each.name for each in found if each.ispkg)]
    packages = [importlib.import_module(name) for name in names]
    missing = [
        f"{each.__name__}.{name}"
        for each in packages
        for name in getattr(each, "__all__", ())
        if not hasattr(each, name)
    ]
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_package_says_that_it_is_typed(package):
    (folder,) = package.__path__
    assert (Path(folder) / "py.typed").is_file()


def test_the_readme_has_at_most_900_words():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_the_architecture_has_a_row_for_every_product_folder():
    assert sorted(product_folders() - set(folder_table())) == []


def test_the_architecture_names_folders_that_exist():
    rows = folder_table()
    assert [folder for folder in rows if not (ROOT / folder).is_dir()] == []
    assert len(rows) == len(set(rows))


def test_documents_link_to_files_that_exist():
    links = [
        (document, target.partition("#")[0])
        for document in documents()
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:|#", target)
    ]
    broken = [target for document, target in links if not (document.parent / target).exists()]
    assert broken == []


def test_documents_name_files_tests_and_benchmarks_that_exist():
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    functions = set(re.findall(r"def (test_\w+)", "\n".join(tests)))
    names = {path.name for path in (ROOT / "tests").rglob("test_*.py")} | functions
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()} - GENERATED

    def missing(text: str) -> Iterator[str]:
        for quoted in re.findall(r"`([^`\n]+)`", text):
            for word in quoted.split():
                path = word.partition("::")[0]
                if path.partition("/")[0] in tops and "/" in path:
                    if not any(ROOT.glob(path.rstrip("/"))):
                        yield path
                elif path.startswith("test_") and path not in names:
                    yield path
        for module in re.findall(r"python -m (benchmarks[\w.]*)", text):
            path = ROOT / module.replace(".", "/")
            if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()):
                yield module

    pages = [*documents(), ROOT / "CONTRIBUTING.md"]
    found = [f"{page.name}: {name}" for page in pages for name in missing(page.read_text("utf-8"))]
    assert found == []


def test_the_reading_page_names_what_stands_in_the_linked_file():
    page = ROOT / "docs" / "reading.md"
    stops = re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)\)", page.read_text(encoding="utf-8"))
    missing = [
        f"{name} in {target}"
        for name, target in stops
        if not re.search(
            rf"^\s*(?:async )?(?:def|class) {name.rpartition('.')[2]}\b",
            (page.parent / target).read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    ]
    assert missing == []
    assert len(stops) >= 20


def test_documents_name_metrics_that_exist():
    packages = {package.__name__ for package in PACKAGES}
    text = "\n".join(document.read_text(encoding="utf-8") for document in documents())
    # After a colon stands the name that a recording rule gives its series.
    named = set(re.findall(r"(?<![\w/:])vcpo_[a-z0-9_]+", text)) - packages
    assert sorted(named - metric_names()) == []


def test_no_file_knows_the_machine_it_was_written_on():
    homes = re.compile(rb"(?<![\w.}-])/(?:work|root|home)/")
    assert [str(path) for path in files() if homes.search(path.read_bytes())] == []
