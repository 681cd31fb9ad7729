"""A real control plane for the contract tests, where its binaries are installed.

The convention is envtest's: `KUBEBUILDER_ASSETS`, or `/usr/local/kubebuilder/bin`, holds
`kube-apiserver`, `etcd` and, for the tests of controllers, `kube-controller-manager`.
Everything listens on 127.0.0.1 and keeps its state in one temporary folder.
Source: https://book.kubebuilder.io/reference/envtest
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ASSETS = "/usr/local/kubebuilder/bin"
ADMIN_TOKEN = "admin-token"
USER_TOKEN = "user-token"
USER_NAME = "bob"
_START_LIMIT_S = 60.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """Paths of the programs. controller_manager: None when it is not installed."""

    etcd: Path
    api_server: Path
    openssl: Path
    controller_manager: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """How to reach a server. certificate: what its TLS certificate is checked against."""

    url: str
    token: str
    certificate: Path | None = None
    controllers: bool = True


def find_binaries(environment: Mapping[str, str]) -> Binaries | str:
    """The programs, or the reason why there are none."""
    folder = Path(environment.get("KUBEBUILDER_ASSETS") or DEFAULT_ASSETS)
    found = {
        name: _program(folder, name)
        for name in ("kube-apiserver", "etcd", "kube-controller-manager", "openssl")
    }
    missing = [name for name in ("kube-apiserver", "etcd", "openssl") if found[name] is None]
    api_server, etcd, openssl = found["kube-apiserver"], found["etcd"], found["openssl"]
    if api_server is None or etcd is None or openssl is None:
        names = ", ".join(missing)
        return f"no {names} in {folder} (set KUBEBUILDER_ASSETS to a folder that has them)"
    return Binaries(
        etcd=etcd,
        api_server=api_server,
        openssl=openssl,
        controller_manager=found["kube-controller-manager"],
    )


def _program(folder: Path, name: str) -> Path | None:
    beside = folder / name
    if beside.is_file():
        return beside
    # Debian has etcd and openssl, so only Kubernetes' own programs must be in the folder.
    on_path = None if name.startswith("kube-") else shutil.which(name)
    return Path(on_path) if on_path else None


@contextlib.contextmanager
def running(binaries: Binaries, folder: Path) -> Iterator[Endpoint]:
    """A control plane that lives as long as the context.

    Raises:
        RuntimeError: when it is not ready within a minute; the message ends with its log.
    """
    etcd_port, peer_port, port = (_free_port() for _ in range(3))
    _make_keys(binaries.openssl, folder)
    _write_access(folder, port)
    with contextlib.ExitStack() as stack:
        for name, command in (
            ("etcd", _etcd(binaries, folder, etcd_port, peer_port)),
            ("kube-apiserver", _api_server(binaries, folder, etcd_port, port)),
        ):
            stack.enter_context(_process(command, folder / f"{name}.log"))
        _wait_until_ready(f"https://127.0.0.1:{port}", folder)
        if binaries.controller_manager is not None:
            command = _controller_manager(binaries.controller_manager, folder)
            stack.enter_context(_process(command, folder / "kube-controller-manager.log"))
        yield Endpoint(
            url=f"https://127.0.0.1:{port}",
            token=ADMIN_TOKEN,
            certificate=folder / "server.crt",
            controllers=binaries.controller_manager is not None,
        )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _make_keys(openssl: Path, folder: Path) -> None:
    """A self-signed certificate for the server, and the key that signs account tokens."""
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    certificate = (
        f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kube-apiserver -addext {names}"
    )
    for arguments in (
        f"{certificate} -keyout server.key -out server.crt",
        "genrsa -out accounts.key 2048",
        "rsa -in accounts.key -pubout -out accounts.pub",
    ):
        command = [str(openssl), *arguments.split()]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)


def _write_access(folder: Path, port: int) -> None:
    """The tokens that the server knows, and the controller manager's kubeconfig."""
    tokens = f'{ADMIN_TOKEN},admin,admin,"system:masters"\n{USER_TOKEN},{USER_NAME},{USER_NAME}\n'
    (folder / "tokens.csv").write_text(tokens)
    (folder / "kubeconfig").write_text(
        "{apiVersion: v1, kind: Config, current-context: k, "
        "contexts: [{name: k, context: {cluster: k, user: k}}], "
        f"clusters: [{{name: k, cluster: {{server: 'https://127.0.0.1:{port}', "
        f"certificate-authority: {folder}/server.crt}}}}], "
        f"users: [{{name: k, user: {{token: {ADMIN_TOKEN}}}}}]}}"
    )


def _etcd(binaries: Binaries, folder: Path, port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(binaries.etcd),
        f"--data-dir={folder}/etcd",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    ]


def _api_server(binaries: Binaries, folder: Path, etcd_port: int, port: int) -> list[str]:
    return [
        str(binaries.api_server),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        "--endpoint-reconciler-type=none",
        f"--tls-cert-file={folder}/server.crt",
        f"--tls-private-key-file={folder}/server.key",
        f"--token-auth-file={folder}/tokens.csv",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder}/accounts.pub",
        f"--service-account-signing-key-file={folder}/accounts.key",
        "--service-cluster-ip-range=10.96.0.0/16",
        # Pods of the tests name no account, and no controller makes the default one in time.
        "--disable-admission-plugins=ServiceAccount",
    ]


def _controller_manager(program: Path, folder: Path) -> list[str]:
    return [
        str(program),
        f"--kubeconfig={folder}/kubeconfig",
        "--bind-address=127.0.0.1",
        "--secure-port=0",
        "--leader-elect=false",
        f"--service-account-private-key-file={folder}/accounts.key",
        "--use-service-account-credentials=false",
    ]


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(url: str, folder: Path) -> None:
    context = ssl.create_default_context(cafile=str(folder / "server.crt"))
    request = urllib.request.Request(
        f"{url}/readyz", headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}
    )
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(request, context=context, timeout=5).close()
            return
        time.sleep(_POLL_S)
    tail = (folder / "kube-apiserver.log").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"kube-apiserver was not ready after {_START_LIMIT_S:g} s:\n{tail}")


def binaries_here() -> Binaries | str:
    """The programs of this machine, or the reason why there are none."""
    return find_binaries(os.environ)
