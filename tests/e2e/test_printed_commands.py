"""Every command that README, guide, chart, notes and manifests print works as it is printed.

Without kubectl only those of helm are typed, and of the others the files that they name looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.e2e.printed_commands import NOTES, ROOT, Typist, documents, named_files
from tests.e2e.user import RUNS
from tests.fakes.kubelet.client import ApiStatusError, KubeClient
from tests.fakes.kubelet.settings import ApiAccess
from tests.fakes.kubernetes.api_server import FakeApiServer
from vcpo_operator.names import RunKey

KUBECTL = shutil.which("kubectl")
GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DOCUMENTS = documents()
KEY = RunKey("default", "countdown")
THERE_ALREADY: dict[str, tuple[str, dict[str, Any]]] = {
    "node worker-3": ("/api/v1/nodes", {"metadata": {"name": "worker-3"}}),
    f"{KEY.name}-learner-0": (
        "/api/v1/namespaces/default/pods",
        {
            "metadata": {"name": f"{KEY.name}-learner-0"},
            "spec": {"containers": [{"name": "learner", "image": "learner:1"}]},
        },
    ),
    f"secret {KEY.name}-keys": (
        "/api/v1/namespaces/default/secrets",
        {"metadata": {"name": f"{KEY.name}-keys"}, "stringData": {"worker": "w"}},
    ),
    f"configmap {KEY.name}-config": (
        "/api/v1/namespaces/default/configmaps",
        {"metadata": {"name": f"{KEY.name}-config"}, "data": {}},
    ),
    f"pvc {KEY.name}-learner": (
        "/api/v1/namespaces/default/persistentvolumeclaims",
        {
            "metadata": {"name": f"{KEY.name}-learner"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        },
    ),
}
"""Objects by the words that a command names them with: their collection, and a body."""
MONITORING = {
    "prometheuses": "Prometheus",
    "servicemonitors": "ServiceMonitor",
    "podmonitors": "PodMonitor",
    "prometheusrules": "PrometheusRule",
}
NAMESPACES = ("team-a", "team-b", "monitoring")
with_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")


@asynccontextmanager
async def reader(folder: Path) -> AsyncIterator[tuple[Typist, KubeClient]]:
    """Somebody in a checkout of the project, with the guide's run.yaml, before an empty cluster."""
    for name in ("charts", "deploy", "examples"):
        (folder / name).symlink_to(ROOT / name)
    run, *_ = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)
    (folder / "run.yaml").write_text(run)
    kubeconfig = folder / "kubeconfig.json"
    async with FakeApiServer() as server, KubeClient(ApiAccess(url=server.url)) as admin:
        kubeconfig.write_text(json.dumps(server.kubeconfig()))
        for plural, kind in MONITORING.items():
            await admin.create(DEFINITIONS, monitoring_definition(plural, kind))
        for name in NAMESPACES:
            await admin.create("/api/v1/namespaces", {"metadata": {"name": name}})
        typist = Typist(folder=folder, kubeconfig=kubeconfig, kubectl=KUBECTL or "")
        try:
            yield typist, admin
        finally:
            typist.close()


def monitoring_definition(plural: str, kind: str) -> dict[str, Any]:
    """A definition of the Prometheus operator's, as far as it matters here."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": plural, "singular": kind.lower(), "kind": kind}
    group = "monitoring.coreos.com"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }


async def make_what_it_speaks_of(command: str, typist: Typist, admin: KubeClient) -> None:
    """The definitions, the operator and a complete run, where a command stands on them."""
    if "install" in command or command.startswith("helm"):
        return
    await type_command(typist, "kubectl apply --server-side --force-conflicts -f deploy/crds.yaml")
    if "vcpo-operator" in command or "delete -f deploy/vcpo.yaml" in command:
        await type_command(
            typist, "kubectl apply --server-side --force-conflicts -f deploy/vcpo.yaml"
        )
    if KEY.name in command:
        await type_command(typist, "kubectl apply --server-side -f run.yaml")
        done = {"type": "Complete", "status": "True", "reason": "Succeeded", "message": "Done."}
        done |= {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
        await admin.merge_patch(f"{RUNS}/{KEY.name}/status", {"status": {"conditions": [done]}})
    for words, (collection, body) in THERE_ALREADY.items():
        if words in command:
            with contextlib.suppress(ApiStatusError):  # made for a command before
                await admin.create(collection, body)


async def type_command(typist: Typist, command: str) -> str:
    return await asyncio.to_thread(typist.type, command)


@pytest.mark.parametrize("name", DOCUMENTS)
async def test_every_command_of_a_document_does_what_it_says(name, tmp_path):
    failures = []
    typable = ("helm", "kubectl") if KUBECTL else ("helm",)
    async with reader(tmp_path) as (typist, admin):
        if name in NOTES:
            await asyncio.to_thread(typist.install, NOTES[name])
        for command in DOCUMENTS[name]:
            if not command.startswith(typable):
                continue
            await make_what_it_speaks_of(command, typist, admin)
            try:
                await type_command(typist, command)
            except (RuntimeError, helm_python.HelmError) as error:
                failures.append(f"{command}: {error}")
    assert failures == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_file_that_a_command_names_is_there(name):
    files = [file for command in DOCUMENTS[name] for file in named_files(command)]
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_documents_print_commands():
    told = [command for name in ("README.md", "docs/kubernetes.md") for command in DOCUMENTS[name]]
    assert any(command.startswith("helm install vcpo charts/vcpo") for command in told)
    assert any(command.startswith("kubectl delete vrun") for command in told)
    assert "NOTES.txt, no definitions" in DOCUMENTS


@with_kubectl
async def test_removing_the_operator_without_helm_leaves_every_run(tmp_path):
    async with reader(tmp_path) as (typist, admin):
        await type_command(
            typist, "kubectl apply --server-side -f deploy/crds.yaml -f deploy/vcpo.yaml"
        )
        await type_command(typist, "kubectl apply --server-side -f run.yaml")
        await type_command(typist, "kubectl delete -f deploy/vcpo.yaml --ignore-not-found")
        assert (await admin.get(f"{RUNS}/{KEY.name}"))["spec"]["steps"] == 400


@with_kubectl
async def test_definitions_that_a_release_kept_are_taken_over_as_the_chart_says(tmp_path):
    labelled, annotated = (
        command
        for command in DOCUMENTS["charts/vcpo/README.md"]
        if command.startswith(("kubectl label", "kubectl annotate"))
    )
    async with reader(tmp_path) as (typist, admin):
        await type_command(typist, "helm install old charts/vcpo --namespace old")
        await type_command(typist, "kubectl apply --server-side -f run.yaml")
        await type_command(typist, "helm uninstall old --namespace old")
        install = "helm install vcpo charts/vcpo --namespace vcpo-system"
        with pytest.raises(helm_python.HelmError, match="cannot be imported into the current"):
            await type_command(typist, install)
        await type_command(typist, labelled)
        await type_command(typist, annotated)
        await type_command(typist, install)
        assert (await admin.get(f"{RUNS}/{KEY.name}"))["spec"]["steps"] == 400


@with_kubectl
async def test_definitions_that_are_not_kept_go_with_the_release_and_so_do_the_runs(tmp_path):
    async with reader(tmp_path) as (typist, admin):
        await type_command(typist, "helm install vcpo charts/vcpo --set crds.keep=false")
        await type_command(typist, "kubectl apply --server-side -f run.yaml")
        await type_command(typist, "helm uninstall vcpo")
        with pytest.raises(ApiStatusError, match="404"):
            await admin.get(f"{RUNS}/{KEY.name}")
