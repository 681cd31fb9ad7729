"""The tree is laid out as its documents say, and `tools.size` counts it truly."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import vcpo
import vcpo_learner
import vcpo_operator
import vcpo_rollout

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"runs", "dist", "__pycache__"}
HEAVY = ("torch", "transformers", "vllm", "numpy", "safetensors")
PACKAGES = (vcpo, vcpo_operator, vcpo_rollout, vcpo_learner)

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
for name in sys.argv[1].split():
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if module.name != "vcpo.wire.deltas":  # for learner and worker, which have numpy
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


def product_folders() -> set[str]:
    """Folders of the packages with a module beside `__init__.py`; generated stubs aside."""
    modules = [
        path
        for package in PACKAGES
        for path in Path(*package.__path__).rglob("*.py")
        if path.name != "__init__.py" and "_pb2" not in path.name
    ]
    return {path.parent.relative_to(ROOT).as_posix() for path in modules}


def test_nothing_shadows_the_operator_module_of_python():
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert (ROOT / "operator" / "vcpo_operator" / "__init__.py").exists()


def test_core_and_operator_load_nothing_heavy():
    # In a fresh interpreter, since this one may have loaded anything.
    command = [sys.executable, "-c", IMPORT_EVERYTHING, "vcpo vcpo_operator"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"vcpo.cli.main", "vcpo.wire.server", "vcpo_operator"} <= set(loaded)
    assert [name for name in HEAVY if name in loaded] == []


def test_the_architecture_has_a_row_for_every_product_folder():
    lines = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()
    rows = lines[lines.index("| folder | what it holds | runs in |") + 2 :]
    listed = {row.split("`")[1] for row in rows if row.startswith("|")}
    assert sorted(product_folders() - listed) == []


def test_documents_link_to_files_that_exist():
    broken = [
        f"{document.name}: {target}"
        for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for target in re.findall(r"\]\((?![a-z]+:|#)([^)\s#]+)", document.read_text("utf-8"))
        if not (document.parent / target).exists()
    ]
    assert broken == []


def test_the_site_has_every_page_in_its_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    listed = set(re.findall(r": ([\w/-]+\.md)$", menu, flags=re.M))
    assert listed == pages | {"index.md", "metrics.md", "reference.md"}


def test_no_file_knows_the_machine_it_was_written_on():
    homes = re.compile(rb"(?<![\w.}-])/(?:work|root|home)/")
    assert [str(path) for path in files() if homes.search(path.read_bytes())] == []
