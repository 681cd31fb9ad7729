"""The Secrets of a run: their content is made and renewed here.

No private key stays in the operator's memory.
"""

import base64
import datetime as dt
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vcpo.wire.access.roles import new_run_keys
from vcpo_operator.children.manifest import Child, Kind
from vcpo_operator.cluster_api.client import ApiError, Cluster, Document, Resource
from vcpo_operator.decisions.conflicts import Conflict, name_conflict
from vcpo_operator.decisions.plan import IssueSecret
from vcpo_operator.names import RunKey, certificate_hosts, certificates_name
from vcpo_operator.observed.parse import parse_child, secret_data
from vcpo_operator.observed.records import ObservedChild

AUTHORITY: Final = "ca"
_AUTHORITY_S: Final = 3650 * 86_400.0
_CERTIFICATE_S: Final = 90 * 86_400.0
RENEWED_BEFORE_S: Final = 30 * 86_400.0
"""Time before its end at which a certificate is renewed: an operator may be down for long."""
_SKEW_S: Final = 3600.0
"""Clocks of nodes may differ; a certificate is valid for this time before it is made."""

SecretData = dict[str, bytes]


def new_certificates(run: str, names: Mapping[str, Sequence[str]], *, now_s: float) -> SecretData:
    """Return a new authority, and a certificate and key for each role."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _sign(
        _builder(f"VCPO run {run}", key, now_s, _AUTHORITY_S)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True),
        _name(f"VCPO run {run}"),
        key,
    )
    data = {f"{AUTHORITY}.crt": _pem(certificate), f"{AUTHORITY}.key": _key_pem(key)}
    return {**data, **_issue(certificate, key, names, now_s)}


def renewed_certificates(
    data: SecretData, names: Mapping[str, Sequence[str]], *, now_s: float
) -> SecretData:
    """Return the data with new certificates of the same authority; clients trust them already.

    Raises: ValueError, KeyError if the data holds no authority.
    """
    authority = x509.load_pem_x509_certificate(data[f"{AUTHORITY}.crt"])
    key = serialization.load_pem_private_key(data[f"{AUTHORITY}.key"], password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{AUTHORITY}.key: must be an elliptic-curve key")  # noqa: TRY004 - content
    return {**data, **_issue(authority, key, names, now_s)}


def first_end_s(data: Mapping[str, bytes], names: Sequence[str]) -> float:
    """Return the Unix time at which the first certificate of these names ends.

    Raises: ValueError, KeyError if one is missing or is none.
    """
    issued = (x509.load_pem_x509_certificate(data[f"{name}.crt"]) for name in names)
    return min(each.not_valid_after_utc.timestamp() for each in issued)


def _issue(
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    names: Mapping[str, Sequence[str]],
    now_s: float,
) -> SecretData:
    data = {}
    for role, hosts in names.items():
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
        certificate = _sign(
            _builder(role, key, now_s, _CERTIFICATE_S)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(alternatives, critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
                critical=False,
            ),
            authority.subject,
            authority_key,
        )
        data[f"{role}.crt"], data[f"{role}.key"] = _pem(certificate), _key_pem(key)
    return data


def _builder(
    subject: str, key: ec.EllipticCurvePrivateKey, now_s: float, valid_s: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_time(now_s - _SKEW_S))
        .not_valid_after(_time(now_s + valid_s))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _sign(
    builder: x509.CertificateBuilder, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    return builder.issuer_name(issuer).sign(key, hashes.SHA256())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    refused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        **dict.fromkeys((*refused, "encipher_only", "decipher_only"), False),
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _time(unix_s: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(unix_s, dt.UTC)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, form, serialization.NoEncryption())


_LOGGER = logging.getLogger(__name__)


class NameConflictError(Exception):
    """Somebody else's object has the name of a child that was to be created."""

    def __init__(self, conflict: Conflict) -> None:
        super().__init__(conflict.message)
        self.conflict = conflict


@dataclass(slots=True, eq=False)
class RunSecrets:
    """Makes and renews the Secrets of runs. One owner: the executor."""

    _cluster: Cluster
    _clock: Callable[[], float]
    """Unix time, for the certificates that are made."""

    async def issue(self, key: RunKey, action: IssueSecret) -> ObservedChild:
        """Create a Secret with new content, unless it exists, or renew what it holds."""
        child = action.child
        if child.name == certificates_name(key.name):
            body = await self._issue_certificates(key, action)
        else:
            made = {role.value: each.encode() for role, each in new_run_keys().items()}
            body = await self._create_secret(key, child, made)
        return parse_child(Kind.SECRET, body)

    async def _issue_certificates(self, key: RunKey, action: IssueSecret) -> Document:
        """Create the Secret of the certificates, or renew those that it holds.

        An authority that cannot be used is replaced, and the certificates with it.
        """
        child, now_s, hosts = action.child, self._clock(), certificate_hosts(key)
        resource = _secret(key, child.name)
        before = await self._cluster.get(resource) if action.renews else None
        if before is None:
            data = new_certificates(key.name, hosts, now_s=now_s)
            return await self._create_secret(key, child, data)
        try:
            data = renewed_certificates(secret_data(before), hosts, now_s=now_s)
        except (ValueError, KeyError):
            data = new_certificates(key.name, hosts, now_s=now_s)
        # Its resource version is that of the one read, so nobody's change is lost.
        body = await self._cluster.replace(resource, {**before, "data": _encode(data)})
        _LOGGER.info("%s: the certificates in Secret %s are renewed", key, child.name)
        return body

    async def _create_secret(
        self, key: RunKey, child: Child, data: Mapping[str, bytes]
    ) -> Document:
        """Create a Secret; return the one that exists already, if it is the run's."""
        collection = Resource(api_version="v1", plural=Kind.SECRET.plural, namespace=key.namespace)
        try:
            return await self._cluster.create(collection, {**child.manifest, "data": _encode(data)})
        except ApiError as error:
            if not error.is_gone:
                raise
            existing = await self._cluster.get(_secret(key, child.name))
            if existing is None:
                raise
            conflict = name_conflict(parse_child(Kind.SECRET, existing), child.owner_uid)
            if conflict is not None:
                raise NameConflictError(conflict) from error
            return existing


def _secret(key: RunKey, name: str) -> Resource:
    return Resource(api_version="v1", plural=Kind.SECRET.plural, namespace=key.namespace, name=name)


def _encode(data: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in data.items()}
