"""The documents as a site: where links lead, and which fields the pages for others' users name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from scripts import document_site as site
from scripts.render_reference import rendered_page

PAGES = sorted(Path("docs/coming-from").glob("*.md"))
SECTIONS = {
    "model",
    "environment",
    "batch",
    "sampling",
    "algorithm",
    "optimizer",
    "evaluation",
    "checkpoint",
    "rollouts",
    "learner",
    "tracking",
    "weights",
}


@pytest.mark.parametrize(
    ("page", "text", "adapted"),
    [
        ("README.md", "[a](docs/methods.md#when)", "[a](methods.md#when)"),
        ("README.md", "[a](docs/runbooks.md#a)", "[a](runbooks.md#a)"),
        ("README.md", '<img src="docs/results/a.svg">', '<img src="results/a.svg">'),
        ("docs/library.md", "[a](methods.md)", "[a](methods.md)"),
        ("docs/library.md", "[a](https://a.org/b)", "[a](https://a.org/b)"),
        ("docs/library.md", "[a](../README.md)", "[a](index.md)"),
        ("docs/library.md", "[a](../Makefile)", "[a](source/Makefile)"),
        ("docs/inside/learner.md", "[a](../../SECURITY.md#b)", "[a](../source/SECURITY.md.txt)"),
        ("docs/library.md", "[a](../nothing.py)", "[a](../nothing.py)"),
    ],
)
def test_a_link_leads_to_where_the_site_has_its_target(page, text, adapted):
    assert site._adapted(text, page) == adapted


def test_files_outside_of_the_documents_are_named():
    text = "[a](../Makefile) [b](methods.md) [c](https://a.org/b)"
    assert list(site.outside(text, "docs/library.md")) == ["Makefile"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_field_that_another_librarys_users_are_told_of_exists(page):
    known = set(re.findall(r"^\| `([^`]+)`", rendered_page(), re.MULTILINE))
    columns = [line.split(" | ")[1] for line in page.read_text().splitlines() if " | `" in line]
    named = {each.split(":")[0] for column in columns for each in re.findall("`([^`]+)`", column)}
    fields = {
        each for each in named if re.split(r"[.\[]", each)[0] in SECTIONS and each not in SECTIONS
    }
    assert len(fields) >= 10
    assert fields <= known


def test_no_link_is_broken(tmp_path, monkeypatch, capsys):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("MkDocs is not installed: pip install 'vcpo[site]'")
    assert site.main() == 0, capsys.readouterr().err
