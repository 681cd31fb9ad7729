"""The pods of a 7 B model on two machines of eight GPUs: they would run on a GPU cluster."""

import dataclasses
from pathlib import Path

import pytest

from tests.fixtures.operator.runs import DEFAULTS, parent, render_run
from vcpo.api import load_run, missing_gpus
from vcpo_operator.children import build_children

EXAMPLE = Path("examples/qwen_7b_2x8.yaml")
PARAMETERS = 7.6e9
GIB = 2**30


def workloads(children):
    """Pod spec and own container of each workload, by its role's name."""
    found = {}
    for child in children:
        template = child.manifest.get("spec", {}).get("template")
        if template is not None:
            container = template["spec"]["containers"][0]
            found[container["name"]] = (template["spec"], container)
    return found


@pytest.fixture(scope="module")
def pods():
    return workloads(render_run(load_run(EXAMPLE)))


def built(**spec):
    return workloads(build_children(parent(**spec), DEFAULTS))


def group(**fields):
    return {"rollouts": [{"name": "main", **fields}]}


def volume(pod, name):
    return next(each for each in pod["volumes"] if each["name"] == name)


def variables(container):
    return {each["name"]: each for each in container["env"]}


def test_learner_and_workers_ask_for_gpus_and_nobody_is_warned(pods):
    asked = {role: own["resources"]["limits"] for role, (_, own) in pods.items()}
    assert asked == {"learner": {"nvidia.com/gpu": 8}, "rollout": {"nvidia.com/gpu": 1}}
    run = load_run(EXAMPLE)
    assert list(missing_gpus(run.spec)) == []


def test_the_example_of_eight_gpus_asks_for_eight():
    run = load_run(Path("examples/qwen_8_gpus.yaml"))
    asked = {
        role: own["resources"]["limits"] for role, (_, own) in workloads(render_run(run)).items()
    }
    assert asked == {"learner": {"nvidia.com/gpu": 4}, "rollout": {"nvidia.com/gpu": 1}}
    assert run.spec.rollouts[0].min_replicas == 4


def test_the_learner_asks_for_the_cores_and_the_memory_that_it_will_use(pods):
    # 5 GiB for each of 8 ranks; 12 bytes a parameter over both pods; 2 for a version, which is its
    # file. A file and the next one are in /dev/shm, with 1 GiB for each rank.
    needed = 8 * 5 * GIB + PARAMETERS * (12 / 2 + 2)
    shared = 8 * GIB + PARAMETERS * 2 * 2
    pod, own = pods["learner"]
    assert own["resources"]["requests"] == {"cpu": "24", "memory": f"{-int(-needed // GIB)}Gi"}
    limit = volume(pod, "shared-memory")["emptyDir"]
    assert limit == {"medium": "Memory", "sizeLimit": f"{-int(-shared // GIB)}Gi"}


def test_a_worker_asks_for_the_memory_in_which_it_loads_a_version(pods):
    needed = 5 * GIB + PARAMETERS * 8
    requests = pods["rollout"][1]["resources"]["requests"]
    assert requests == {"cpu": "3", "memory": f"{-int(-needed // GIB)}Gi"}


def test_all_pods_find_the_model_in_one_cache_with_the_token_of_the_hub(pods):
    assert set(pods) == {"learner", "rollout"}
    for pod, own in pods.values():
        assert volume(pod, "model-cache")["persistentVolumeClaim"] == {"claimName": "models"}
        mounts = {each["name"]: each["mountPath"] for each in own["volumeMounts"]}
        assert variables(own)["HF_HOME"]["value"].startswith(mounts["model-cache"])
        reference = variables(own)["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "hub", "key": "token"}
        assert "ephemeral-storage" not in own["resources"]["requests"]


def test_a_pod_that_downloads_the_model_asks_for_the_disk():
    model = {"name": "org/m", "sizeBillions": 7.6}
    for pod, own in built(model=model).values():
        needed = -int(-(PARAMETERS * 4 + 10 * GIB) // GIB)
        assert own["resources"]["requests"]["ephemeral-storage"] == f"{needed}Gi"
        limit = int(volume(pod, "scratch")["emptyDir"]["sizeLimit"].removesuffix("Gi"))
        assert limit >= needed
    for pod, own in built(model={**model, "name": "/models/m"}).values():
        assert "ephemeral-storage" not in own["resources"]["requests"]
        assert volume(pod, "scratch")["emptyDir"] == {}


def test_the_learners_pods_keep_together_and_workers_fill_machines(pods):
    places = {}
    for role, (pod, _) in pods.items():
        affinity = pod["affinity"]["podAffinity"]
        (wish,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        assert wish["podAffinityTerm"]["labelSelector"]["matchLabels"]["vcpo.dev/role"] == role
        places[role] = wish["podAffinityTerm"]["topologyKey"]
        assert "topologySpreadConstraints" not in pod
    assert places == {"learner": "topology.kubernetes.io/zone", "rollout": "kubernetes.io/hostname"}


def test_the_operators_pull_secrets_and_name_of_gpus_hold_where_a_run_names_none():
    defaults = dataclasses.replace(
        DEFAULTS, image_pull_secrets=("mirror",), gpu_resource_name="amd.com/gpu"
    )
    made = workloads(build_children(parent(**group(gpus=2)), defaults))
    assert made["rollout"][0]["imagePullSecrets"] == [{"name": "mirror"}]
    assert made["rollout"][1]["resources"]["limits"] == {"amd.com/gpu": 2}


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({"engine": "vllm"}, {"nvidia.com/gpu": 1}),
        ({"engine": "vllm", "tensorParallelSize": 4}, {"nvidia.com/gpu": 4}),
        ({"engine": "vllm", "gpus": 0}, {"memory": "32Gi"}),
        ({"gpus": 1}, {"nvidia.com/gpu": 1}),
        ({}, {"memory": "32Gi"}),
    ],
)
def test_a_worker_has_the_gpus_of_its_engine_or_those_that_it_names(fields, limits):
    assert built(**group(**fields))["rollout"][1]["resources"]["limits"] == limits


@pytest.mark.parametrize(
    "resources", [{"limits": {"nvidia.com/mig-3g.40gb": 1}}, {"claims": [{"name": "gpu"}]}]
)
def test_a_template_that_asks_for_part_of_a_gpu_gets_no_whole_one_beside_it(resources):
    template = {"spec": {"containers": [{"name": "rollout", "resources": resources}]}}
    asked = built(**group(engine="vllm", template=template))["rollout"][1]["resources"]
    assert "nvidia.com/gpu" not in asked.get("limits", {})


def test_the_template_of_all_pods_reaches_each_role_under_its_own():
    common = {
        "spec": {
            "nodeSelector": {"pool": "a", "zone": "b"},
            "containers": [
                {"name": "learner", "env": [{"name": "A", "value": "1"}]},
                {"name": "rollout", "env": [{"name": "A", "value": "2"}]},
            ],
        }
    }
    own = {"spec": {"nodeSelector": {"pool": "gpus"}}}
    made = built(pods={"template": common}, learner={"template": own})
    assert made["learner"][0]["nodeSelector"] == {"pool": "gpus", "zone": "b"}
    assert made["rollout"][0]["nodeSelector"] == {"pool": "a", "zone": "b"}
    values = {role: variables(own)["A"]["value"] for role, (_, own) in made.items()}
    assert values == {"learner": "1", "rollout": "2"}
    assert all(len(pod["containers"]) == 1 for pod, _ in made.values())


@pytest.mark.parametrize(
    ("place", "spec"),
    [
        ("spec.pods.template", {"pods": {"template": {}}}),
        ("spec.learner.template", {"learner": {"template": {}}}),
        ("spec.rollouts[main].template", group(template={})),
    ],
)
def test_a_bad_quantity_is_named_with_its_field_its_value_and_the_cure(place, spec):
    role = "rollout" if "rollouts" in spec else "learner"
    bad = [{"name": role, "resources": {"limits": {"memory": "48GiB"}}}]
    (section,) = spec.values()
    (section[0] if isinstance(section, list) else section)["template"] = {
        "spec": {"containers": bad}
    }
    with pytest.raises(ValueError, match="48GiB") as caught:
        built(**spec)
    field = f"`spec.containers[{role}].resources.limits[memory]` is '48GiB'"
    assert str(caught.value).startswith(f"{place}: {field}; write a number with a unit such as")
