"""The operator's own process, as its image starts it: under a user id without a name."""

import asyncio
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.fixtures.kubernetes.waiting import until_stored
from tests.fixtures.operator.operator import KEY, operator_fixture
from vcpo.local.processes.child import free_port

STRANGER = ("unshare", "--user", "--map-user=65532", "--map-group=65532")
"""Runs a command under the image's user id; no passwd file knows it."""
OPERATOR = (sys.executable, "-m", "vcpo_operator", "--learner-image=l", "--rollout-image=r")
WITHOUT_A_NAME = {"HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "POD_ID", "POD_NAME"}


def refusal() -> str:
    """Why this machine cannot run a command under another user id; empty when it can."""
    if shutil.which(STRANGER[0]) is None:
        return "no `unshare` here"
    tried = subprocess.run([*STRANGER, "true"], capture_output=True, text=True, check=False)
    return tried.stderr


@pytest.mark.skipif(bool(refusal()), reason=f"no user namespaces here: {refusal()}")
async def test_the_operator_works_under_a_user_id_without_a_name_or_a_home(tmp_path):
    async with operator_fixture() as operator:
        await operator.create()
        kubeconfig = tmp_path / "kubeconfig.json"
        kubeconfig.write_text(json.dumps(operator.server.kubeconfig()))
        left = {name: value for name, value in os.environ.items() if name not in WITHOUT_A_NAME}
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(*STRANGER, *OPERATOR, "--metrics-listen=127.0.0.1:0"),
                f"--liveness-listen=127.0.0.1:{free_port()}",
                env={**left, "KUBECONFIG": str(kubeconfig)},
                stdout=log,
                stderr=log,
            )
        watching = asyncio.create_task(process.wait())
        seeing = asyncio.create_task(until_stored(operator.server, lambda: has_status(operator)))
        await asyncio.wait([watching, seeing], return_when=asyncio.FIRST_COMPLETED)
        assert not watching.done(), (tmp_path / "log").read_text()
        process.kill()
        await asyncio.gather(watching, seeing)


def has_status(operator):
    body = operator.server.api.store.get(("vcpo.dev", "vcporuns"), *KEY)
    return body is not None and body.get("status")
