"""How `tools.size` counts."""

import pytest

from tools.size import files_below, num_long_functions

PAGE = """
# Page
## The way
1. [a](../core/a.py), [a](../core/a.py),
2. [b](../core/b.py) and [page](b.md)
## Next
[c](../core/c.py)
"""


def test_a_way_has_the_python_files_of_its_list_each_once():
    assert files_below(PAGE, "## The way") == {"../core/a.py", "../core/b.py"}
    with pytest.raises(ValueError, match="no heading '## Another'"):
        files_below(PAGE, "## Another")


@pytest.mark.parametrize(("lines", "number"), [(70, 0), (71, 1)])
def test_a_function_may_have_70_lines(lines, number):
    body = "    pass\n" * (lines - 1)
    assert num_long_functions(f"def long():\n{body}") == number
