"""What the system lets a program's child do: everything, no bubblewrap, or no namespaces."""

import pytest

from vcpo.metrics.label_values import SandboxMechanism
from vcpo_rollout.sandbox import runner
from vcpo_rollout.sandbox.bubblewrap import find_bubblewrap
from vcpo_rollout.sandbox.runner import isolation


@pytest.fixture(params=SandboxMechanism, scope="module")
def system(request, tmp_path_factory):
    """The mechanism in force; most pods allow filters only."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param is SandboxMechanism.BUBBLEWRAP:
            if find_bubblewrap() is None:
                pytest.skip("bubblewrap is not installed")
        else:
            patch.setattr(runner, "find_bubblewrap", lambda: None)
        if request.param is SandboxMechanism.FILTERS:
            text = runner._CHILD.read_text()
            refused = text.replace("own_root or _leave_namespaces()", "False")
            assert refused != text
            child = tmp_path_factory.mktemp("filters") / "child.py"
            child.write_text(refused)
            patch.setattr(runner, "_CHILD", child)
        isolation.cache_clear()
        if isolation().mechanism is not request.param:
            pytest.skip(f"this system refuses {request.param}")
        yield request.param
    isolation.cache_clear()
