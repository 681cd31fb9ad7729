"""The recipes of docs/kubernetes.md make the pods that they say, over the example of 7 B."""

import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.fixtures.operator.runs import render_run
from vcpo.api import VCPORun
from vcpo_operator.children.pod_template.overlay import merge_template

EXAMPLE, PAGE = Path("examples/qwen_7b_2x8.yaml"), Path("docs/kubernetes.md")
READ = YAML(typ="safe")


def blocks(heading: str) -> list[list[dict[str, Any]]]:
    """The documents of each block of YAML below a heading."""
    section = PAGE.read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    texts = re.findall(r"```yaml\n(.*?)```", section, flags=re.S)
    return [list(READ.load_all(text)) for text in texts]


def templates(recipe: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Pod template of each role, of the example with a recipe."""
    example = READ.load(EXAMPLE.read_text())
    run = VCPORun.model_validate({**example, "spec": merge_template(example["spec"], recipe)})
    found = {}
    for child in render_run(run):
        if (template := child.manifest.get("spec", {}).get("template")) is not None:
            found[template["spec"]["containers"][0]["name"]] = template
    return found


def test_rdma_pins_memory_and_leaves_the_gpus_and_the_workers_as_they_are():
    ((recipe,),) = blocks("RDMA between the learner's pods")
    made, plain = templates(recipe["spec"]), templates({})
    (learner,) = made["learner"]["spec"]["containers"]
    assert learner["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 8}
    assert learner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    variables = {each["name"]: each.get("value") for each in learner["env"]}
    assert variables["NCCL_NET"] == "IB"
    assert variables["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "k8s.v1.cni.cncf.io/networks" in made["learner"]["metadata"]["annotations"]
    shared = [
        each for each in made["learner"]["spec"]["volumes"] if each["name"] == "shared-memory"
    ]
    assert shared[0]["emptyDir"]["medium"] == "Memory"
    assert made["rollout"]["spec"] == plain["rollout"]["spec"]


def test_a_gang_is_all_pods_of_learner_and_least_workers():
    ((recipe, group),) = blocks("Queues and gangs")
    spec = READ.load(EXAMPLE.read_text())["spec"]
    least = spec["learner"]["replicas"] + sum(each["minReplicas"] for each in spec["rollouts"])
    assert group["spec"]["minMember"] == least
    given = recipe["spec"]["pods"]["template"]
    for template in templates(recipe["spec"]).values():
        assert template["spec"]["schedulerName"] == given["spec"]["schedulerName"]
        for kind, values in given["metadata"].items():
            assert values.items() <= template["metadata"][kind].items()
            assert group["metadata"]["name"] in values.values()
