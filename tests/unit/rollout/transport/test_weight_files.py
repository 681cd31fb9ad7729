"""Files of weights come from the server that the manifest names, with the key and over TLS."""

from __future__ import annotations

import pytest

from tests.fixtures.certificates import write_certificates
from tests.fixtures.rollout.policy_versions import payload_of, served_versions
from vcpo.metrics import RolloutMetrics
from vcpo.wire.access.roles import CallerRole, new_key
from vcpo.wire.access.tls import CertificateFolder
from vcpo.wire.weights import full_set_name
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.weight_files import ArrivingFile, WeightFiles, server_address

KEY = new_key()
NAME = "localhost"


@pytest.mark.parametrize(
    ("address", "learner", "expected"),
    [
        (":7601", "learner:7600", ("learner", 7601)),
        (":7601", "[::1]:7600", ("::1", 7601)),
        ("rank-3:7601", "learner:7600", ("rank-3", 7601)),
    ],
)
def test_an_address_without_a_host_is_a_port_of_the_learner(address, learner, expected):
    assert server_address(address, learner) == expected


async def read(folder, manifest):
    gauges = RolloutGauges(RolloutMetrics(run="run", group="main"))
    certificates = CertificateFolder(folder)
    files = WeightFiles(f"{NAME}:7600", gauges, key=KEY, certificates=certificates)
    name = full_set_name(manifest.full_set_version)
    whole = ArrivingFile(name=name, total_bytes=manifest.total_bytes)
    await files.read(manifest, [whole])
    return whole.content


async def test_files_come_from_the_server_that_is_named_with_the_key_and_over_tls(tmp_path):
    write_certificates(tmp_path, [NAME])
    server = {"keys": {CallerRole.WORKER: KEY}, "certificates": CertificateFolder(tmp_path)}
    with served_versions(4, **server) as learner:
        assert await read(tmp_path, learner.manifest()) == payload_of(4)
        write_certificates(tmp_path, [NAME])  # of a new authority, which both sides follow
        assert await read(tmp_path, learner.manifest()) == payload_of(4)


async def test_a_server_of_another_authority_gets_no_key(tmp_path):
    write_certificates(tmp_path / "theirs", [NAME])
    write_certificates(tmp_path / "ours", [NAME])
    with served_versions(4, certificates=CertificateFolder(tmp_path / "theirs")) as stranger:
        with pytest.raises(OSError, match="certificate verify failed"):
            await read(tmp_path / "ours", stranger.manifest())
        assert stranger.requests == []
