"""An API server accepts the plain manifests, and deletes them completely."""

import re

import pytest
from ruamel.yaml import YAML

from tests.fixtures.chart.rendering import ROOT
from tests.fixtures.kubernetes.client import Client

MANIFESTS = ROOT / "deploy" / "vcpo.yaml"
CLUSTER_WIDE = (
    "Namespace",
    "CustomResourceDefinition",
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
)


def documents():
    return list(YAML(typ="safe").load_all(MANIFESTS.read_text()))


def path_of(body):
    version, kind, metadata = body["apiVersion"], body["kind"], body["metadata"]
    root = "/apis/" if "/" in version else "/api/"
    place = "" if kind in CLUSTER_WIDE else f"/namespaces/{metadata['namespace']}"
    plural = re.sub("ys$", "ies", f"{kind.lower()}s")
    return f"{root}{version}{place}/{plural}/{metadata['name']}"


@pytest.fixture
async def installed(api: Client):
    """The answers to applying every document in order; taken away afterwards."""
    answers = [await api.apply(path_of(body), body, "kubectl") for body in documents()]
    yield answers
    for body in reversed(documents()):
        await api.delete(path_of(body))
    for body in documents():
        collection, _, name = path_of(body).rpartition("/")
        await api.until_gone(collection, name)


async def test_every_document_is_taken(installed):
    refused = {answer.code: answer.body.get("message") for answer in installed if answer.code > 201}
    assert refused == {}


async def test_applying_them_again_changes_nothing(api: Client, installed):
    for body in documents():
        before = (await api.get(path_of(body))).body["metadata"].get("generation")
        again = await api.apply(path_of(body), body, "kubectl")
        assert again.code == 200
        assert again.body["metadata"].get("generation") == before
