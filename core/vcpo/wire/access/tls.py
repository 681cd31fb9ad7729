"""TLS of the wire: certificates in files, which are read again when they change.

A folder holds what a Secret of cert-manager holds: `ca.crt`, the authority that clients trust;
`tls.crt` and `tls.key`, the certificate and the private key of a server. A server reads its two
files before every handshake, so a renewed certificate needs no restart. A client reads the
authority when it opens a channel.
"""

import argparse
import ipaddress
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import grpc

AUTHORITY_FILE: Final = "ca.crt"
CERTIFICATE_FILE: Final = "tls.crt"
PRIVATE_KEY_FILE: Final = "tls.key"

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Whom a client trusts."""

    authority: bytes
    """Certificates of authorities, PEM."""
    server_name: str | None = None
    """Name that the server's certificate must have; None: the host that the client dials."""


NOBODY: Final = Trust(authority=b"nobody")
"""Trust in nobody: every connection fails."""


class CertificateFolder:
    """The folder with a process's certificates."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._authority: bytes | None = None
        """The authority that was read last."""

    def check(self) -> None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._path / CERTIFICATE_FILE, self._path / PRIVATE_KEY_FILE)
            context.load_verify_locations(self._path / AUTHORITY_FILE)
        except ssl.SSLError as error:
            files = f"{CERTIFICATE_FILE}, {PRIVATE_KEY_FILE} and {AUTHORITY_FILE}"
            raise ValueError(
                f"{self._path}: {files} must be a certificate, its private key and its authority"
                f" in PEM ({error.reason or error})"
            ) from error

    def trust(self, server_name: str | None = None) -> Trust:
        """Return the authority that the folder holds now, or held when it could be read last."""
        try:
            self._authority = (self._path / AUTHORITY_FILE).read_bytes()
        except OSError as error:
            if self._authority is None:
                raise
            _LOGGER.warning("%s: the authority in use stays: %s", self._path, error)
        return Trust(authority=self._authority, server_name=server_name)

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._path / CERTIFICATE_FILE, self._path / PRIVATE_KEY_FILE)
        return context

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.trust().authority.decode("ascii", "replace"))

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials that follow the files."""
        served = self._key_and_certificate()

        def renew() -> grpc.ServerCertificateConfiguration | None:
            """Return the new configuration, if the files have changed; gRPC's own thread calls."""
            nonlocal served
            try:
                found = self._key_and_certificate()
            except OSError as error:
                _LOGGER.warning("%s: the certificate in use stays: %s", self._path, error)
                return None
            if found == served:
                return None
            served = found
            _LOGGER.info("%s: serving with a new certificate", self._path)
            return grpc.ssl_server_certificate_configuration([found])

        initial = grpc.ssl_server_certificate_configuration([served])
        # The types of grpc forget that None leaves the certificate as it is.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", renew)
        return grpc.dynamic_ssl_server_credentials(initial, fetch)

    def _key_and_certificate(self) -> tuple[bytes, bytes]:
        key = (self._path / PRIVATE_KEY_FILE).read_bytes()
        return key, (self._path / CERTIFICATE_FILE).read_bytes()


def checked_folder(
    addresses: Mapping[str, str], path: Path | None, *, plain_text: bool
) -> CertificateFolder | None:
    """Return the certificates of a process; None: plain text.

    addresses: where it serves and whom it calls, `host:port` by the option that says so.
    path: folder of the certificates; None if there is none.
    plain_text: whether the user allows plain text beyond loopback.
    """
    if path is not None and plain_text:
        raise ValueError(f"--plain-text: contradicts --tls={path}; leave one of them out")
    if path is not None:
        folder = CertificateFolder(path)
        folder.check()
        return folder
    for option, address in addresses.items():
        if not plain_text and not is_loopback(address):
            raise ValueError(
                f"{option}={address}: others could read along; give certificates with --tls, stay"
                " on 127.0.0.1, or say --plain-text"
            )
    return None


def is_loopback(address: str) -> bool:
    """Return whether `host:port` is on this machine, so that nobody reads along."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add `--tls`, `--plain-text` and `--health-listen`."""
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="folder with ca.crt, tls.crt and tls.key; they are read again when they change",
    )
    parser.add_argument(
        "--plain-text",
        action="store_true",
        help="serve and call in plain text, also beyond this machine",
    )
    parser.add_argument(
        "--health-listen",
        metavar="HOST:PORT",
        help="where health checks are answered in plain text too, for probes (default: nowhere)",
    )
