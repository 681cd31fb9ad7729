"""The sandboxes that work on this system, and a bubblewrap that does not."""

import pytest

from examples.plugins.python_tool.programs import why_not
from examples.plugins.python_tool.python_tool.runner import Sandbox, check_sandbox


@pytest.fixture(params=Sandbox)
def sandbox(request):
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def bubblewrap():
    if reason := why_not(Sandbox.BUBBLEWRAP):
        pytest.skip(reason)


@pytest.fixture
def refused_bubblewrap(tmp_path, monkeypatch):
    """A bubblewrap that the system refuses the namespaces, as most pods do."""
    path = tmp_path / "bwrap"
    path.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2\nexit 1\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check_sandbox.cache_clear()
    yield
    check_sandbox.cache_clear()
