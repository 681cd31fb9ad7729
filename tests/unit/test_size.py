"""How `tools.size` counts."""

from __future__ import annotations

import pytest

from tools.size import code_lines, files_below

MODULE = '''"""A module.

Two lines.
"""

import os  # why

# A comment.


class Record:
    """A record."""

    field: str = (
        "a"
    )
    """The field."""
'''
PAGE = """
# Page
## The way
1. [a](../core/a.py), [a](../core/a.py),
2. [b](../core/b.py) and [page](b.md)
## Next
[c](../core/c.py)
"""


def test_lines_of_code_are_those_without_blanks_comments_and_docstrings():
    assert code_lines(MODULE) == {6, 11, 14, 15, 16}


def test_a_way_has_the_python_files_of_its_list_each_once():
    assert files_below(PAGE, "## The way") == {"../core/a.py", "../core/b.py"}
    with pytest.raises(ValueError, match="no heading '## Another'"):
        files_below(PAGE, "## Another")
