from __future__ import annotations

from pathlib import Path

from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.real_api_server import Endpoint, find_binaries


async def test_the_contract_also_runs_on_a_real_server(real_endpoint: Endpoint) -> None:
    async with Client(real_endpoint) as api:
        assert (await api.get("/version")).body["gitVersion"].startswith("v")


def test_missing_programs_are_named_with_their_folder(tmp_path: Path) -> None:
    reason = find_binaries({"KUBEBUILDER_ASSETS": str(tmp_path)})
    assert isinstance(reason, str)
    assert "kube-apiserver" in reason
    assert str(tmp_path) in reason


def test_programs_are_taken_from_the_folder_that_the_environment_names(tmp_path: Path) -> None:
    for name in ("kube-apiserver", "etcd", "openssl"):
        (tmp_path / name).touch()
    found = find_binaries({"KUBEBUILDER_ASSETS": str(tmp_path)})
    assert not isinstance(found, str)
    assert found.api_server == tmp_path / "kube-apiserver"
    assert found.controller_manager is None
