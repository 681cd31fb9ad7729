from pathlib import Path

import pytest

from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.real_api_server import Binaries, Endpoint, find_binaries


async def test_the_contract_also_runs_on_a_real_server(real_endpoint: Endpoint) -> None:
    async with Client(real_endpoint) as api:
        assert (await api.get("/version")).body["gitVersion"].startswith("v")


@pytest.mark.parametrize(
    ("version", "is_taken"), [("3.4.23", False), ("3.5.13", True), ("3.6.0", True)]
)
def test_an_etcd_whose_watches_miss_events_is_not_taken(
    tmp_path: Path, version: str, *, is_taken: bool
) -> None:
    for name in ("kube-apiserver", "etcd", "openssl"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
        (tmp_path / name).chmod(0o755)
    found = find_binaries({"KUBEBUILDER_ASSETS": str(tmp_path)})
    assert isinstance(found, Binaries) is is_taken, found
