"""Certificates of a run, judged by Python's own TLS and by another library's reading."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from vcpo_operator.cluster_api.run_secrets import (
    RENEWED_BEFORE_S,
    first_end_s,
    new_certificates,
    renewed_certificates,
)

DAY_S = 86_400.0
NAMES = {"learner": ["demo-learner", "demo-learner.ml.svc"], "rollout": ["demo-rollout"]}
NOW_S = 1_800_000_000.0


def verify(data, role, host, at_s):
    """Verify a role's certificate for a host as a client would; the chain has two."""
    store = Store([x509.load_pem_x509_certificate(data["ca.crt"])])
    moment = datetime.fromtimestamp(at_s, UTC)
    verifier = PolicyBuilder().store(store).time(moment).build_server_verifier(x509.DNSName(host))
    chain = verifier.verify(x509.load_pem_x509_certificate(data[f"{role}.crt"]), [])
    assert len(chain) == 2


@pytest.fixture(scope="module")
def data():
    return new_certificates("demo", NAMES, now_s=NOW_S)


@pytest.mark.parametrize(
    ("role", "host"),
    [("learner", "demo-learner"), ("learner", "demo-learner.ml.svc"), ("rollout", "demo-rollout")],
)
def test_a_client_accepts_each_name_of_a_role_while_its_certificate_is_valid(data, role, host):
    for at_s in (NOW_S - 3000.0, NOW_S, NOW_S + 89 * DAY_S):
        verify(data, role, host, at_s)
    for at_s in (NOW_S - 2 * DAY_S, NOW_S + 91 * DAY_S):
        with pytest.raises(VerificationError):
            verify(data, role, host, at_s)


def test_a_workers_certificate_is_none_of_the_learner(data):
    with pytest.raises(VerificationError):
        verify(data, "rollout", "demo-learner", NOW_S)


def test_a_certificate_of_a_role_signs_no_other(data):
    learner = x509.load_pem_x509_certificate(data["learner.crt"])
    assert not learner.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_every_role_and_every_run_has_a_private_key_of_its_own(data):
    other = new_certificates("demo", NAMES, now_s=NOW_S)
    keys = {each[name] for each in (data, other) for name in each if name.endswith(".key")}
    assert len(keys) == 6
    with pytest.raises(VerificationError):
        verify({**data, "ca.crt": other["ca.crt"]}, "learner", "demo-learner", NOW_S)


def test_a_renewed_certificate_has_the_same_authority_and_a_later_end(data):
    later_s = NOW_S + 60 * DAY_S
    renewed = renewed_certificates(data, NAMES, now_s=later_s)
    assert renewed["ca.crt"] == data["ca.crt"]
    assert renewed["learner.key"] != data["learner.key"]
    assert first_end_s(data, list(NAMES)) == NOW_S + 90 * DAY_S
    assert first_end_s(renewed, list(NAMES)) == later_s + 90 * DAY_S
    verify(renewed, "learner", "demo-learner", later_s + 89 * DAY_S)
    assert RENEWED_BEFORE_S == 30 * DAY_S


def test_a_long_name_of_a_run_fits_into_the_authority_s():
    data = new_certificates("r" * 63, {"learner": ["l"]}, now_s=NOW_S)
    verify(data, "learner", "l", NOW_S)
    public = x509.load_pem_x509_certificate(data["learner.crt"]).public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
