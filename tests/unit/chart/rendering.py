"""The chart as Helm renders it: values in, objects out. The objects are shared: copy to change."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "vcpo"
NAMESPACE = "vcpo-system"

Values = dict[str, Any]
Manifest = dict[str, Any]


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


@functools.cache
def _parsed(text: str) -> list[Manifest]:
    return [document for document in YAML(typ="safe").load_all(text) if document]


def render_files(values: Values | None = None) -> dict[str, str]:
    """Rendered text by template, without the chart's own prefix."""
    files = chart().render(values or {}, name="vcpo", namespace=NAMESPACE)
    return {name.removeprefix("vcpo/templates/"): text for name, text in files.items()}


def render(values: Values | None = None) -> list[Manifest]:
    """Every object of a release called `vcpo`."""
    files = render_files(values)
    texts = [text for name, text in files.items() if name != "NOTES.txt"]
    return [manifest for text in texts for manifest in _parsed(text)]


def of_kind(kind: str, values: Values | None = None) -> list[Manifest]:
    return [manifest for manifest in render(values) if manifest["kind"] == kind]


def only(kind: str, values: Values | None = None) -> Manifest:
    (manifest,) = of_kind(kind, values)
    return manifest


def operator_pod(values: Values | None = None) -> Manifest:
    """Pod spec of the operator."""
    spec: Manifest = only("Deployment", values)["spec"]["template"]["spec"]
    return spec


def default_values() -> Values:
    values: Values = YAML(typ="safe").load((CHART / "values.yaml").read_text())
    return values


def leaves(tree: Values, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Paths and values of everything that is not a mapping with keys of its own."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def nested(path: tuple[str, ...], value: object) -> Values:
    """`nested(("a", "b"), 1)` is `{"a": {"b": 1}}`."""
    tree: Any = value
    for key in reversed(path):
        tree = {key: tree}
    result: Values = tree
    return result


def template_sources() -> str:
    paths = [path for path in (CHART / "templates").rglob("*") if path.is_file()]
    text = "\n".join(path.read_text() for path in sorted(paths))
    return re.sub(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", "", text, flags=re.S)
