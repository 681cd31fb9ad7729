"""Every benchmark can be imported: what it calls in the product still exists."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_has_a_main_function(module):
    assert callable(importlib.import_module(module).main)
