"""Every example works as it stands, where it says that it does."""

import re

import pytest
from kubernetes.utils.quantity import parse_quantity
from ruamel.yaml import YAML

from tests.e2e.cluster import DEFINITIONS
from tests.e2e.user import RUNS, config_map, load
from tests.fakes.kubelet.client import KubeClient
from tests.fakes.kubelet.settings import ApiAccess
from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fixtures.chart.rendering import ROOT
from vcpo.api import load_run
from vcpo_operator.children import Kind, OperatorDefaults, build_children
from vcpo_operator.children.manifest import Owner
from vcpo_operator.children.revision import make_parent
from vcpo_operator.names import RunKey

EXAMPLES = ROOT / "examples"
FILES = [path for path in sorted(EXAMPLES.glob("*.yaml")) if "kind: VCPORun\n" in path.read_text()]
IN_A_CLUSTER = [path for path in FILES if "kubectl apply" in path.read_text()]
ON_THIS_MACHINE = [path for path in FILES if "vcpo run" in path.read_text()]
FETCHED = [path for path in FILES if "models.make_model" in path.read_text()]
"""Their models are made when they are asked for."""
FROM_THE_HUB = [path for path in FILES if "Hugging Face hub" in path.read_text()]
NEEDS_A_GPU = [path for path in FILES if "GPU for the learner" in path.read_text()]
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
DEFINITIONS_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def for_each_file(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def test_every_example_says_where_it_runs():
    assert set(FILES) == set(IN_A_CLUSTER) | set(ON_THIS_MACHINE)
    assert IN_A_CLUSTER
    assert ON_THIS_MACHINE


@for_each_file(FILES)
def test_an_example_prints_its_own_command(path):
    commands = re.findall(r"^#   .*", path.read_text(), flags=re.MULTILINE)
    own = (f"examples/{path.name}", "-k examples")
    assert any(each in command for each in own for command in commands)


@for_each_file(ON_THIS_MACHINE)
def test_an_example_for_this_machine_is_valid_and_finds_its_model(path):
    run = load_run(path)
    elsewhere = path in (*FETCHED, *FROM_THE_HUB)
    assert elsewhere or (path.parent / run.spec.model.name / "config.json").is_file()


@for_each_file(IN_A_CLUSTER)
async def test_an_example_for_a_cluster_is_taken_by_its_api_server(path):
    async with FakeApiServer() as server, KubeClient(ApiAccess(url=server.url)) as client:
        for definition in DEFINITIONS:
            await client.create(DEFINITIONS_PATH, load(definition))
        await server.wait_until_settled()
        made = await client.create(RUNS, load(path))
        assert made["spec"]["batch"]["promptsPerStep"] >= 1  # defaults are filled in


def workloads(path):
    run = load_run(path)
    owner = Owner(key=RunKey("default", run.metadata.name), uid="u")
    made = build_children(
        make_parent(run, owner), OperatorDefaults(learner_image="l", rollout_image="r")
    )
    kinds = {Kind.STATEFUL_SET, Kind.DEPLOYMENT}
    return [each.manifest["spec"]["template"]["spec"] for each in made if each.kind in kinds]


@for_each_file(NEEDS_A_GPU)
def test_an_example_that_needs_a_gpu_asks_for_one_and_for_memory_in_every_pod(path):
    for pod in workloads(path):
        (container,) = pod["containers"]
        limits = container["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == 1
        copies = {"learner": 5, "rollout": 2}[container["name"]]  # of 1.54 B float32 parameters
        assert parse_quantity(limits["memory"]) > 1.3 * copies * 4 * 1.54e9


def test_some_example_needs_a_gpu():
    assert NEEDS_A_GPU


@for_each_file(IN_A_CLUSTER)
def test_what_an_example_mounts_comes_with_it(path):
    kustomization = YAML(typ="safe").load((EXAMPLES / "kustomization.yaml").read_text())
    made = {each["name"]: each["files"] for each in kustomization["configMapGenerator"]}
    mounted = {
        volume["configMap"]["name"]
        for pod in workloads(path)
        for volume in pod["volumes"]
        if "configMap" in volume and volume["name"] != "config"
    }
    comes_along = made if path.name in kustomization["resources"] else {}
    assert mounted <= set(comes_along)


def test_the_model_of_the_demo_is_whole_and_fits_into_a_config_map():
    kustomization = YAML(typ="safe").load((EXAMPLES / "kustomization.yaml").read_text())
    (generator,) = kustomization["configMapGenerator"]
    model = EXAMPLES / "models" / "tiny"
    assert {EXAMPLES / file for file in generator["files"]} == set(model.iterdir())
    assert sum(file.stat().st_size for file in model.iterdir()) < 1024 * 1024
    assert set(config_map("tiny-model", model)["binaryData"]) == {
        file.name for file in model.iterdir()
    }
