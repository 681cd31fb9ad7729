"""The chart's PrometheusRule is the rule file with the thresholds of the values."""

import functools
import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import cel
import helm_python
import pytest
from packaging.requirements import Requirement
from ruamel.yaml import YAML

from scripts.render_manifests import DEFINITION, MANIFESTS, chart_definition, rendered_files
from tests.fixtures.chart.rendering import (
    CHART,
    ROOT,
    Manifest,
    Values,
    chart,
    default_values,
    of_kind,
    only,
    operator_pod,
    render,
)
from tests.fixtures.chart.variants import EVERYTHING, all_variants
from tests.fixtures.operator.stored_runs import stored_run
from tests.fixtures.rules.promtool import needs_promtool, promtool
from tests.fixtures.rules.variants import thresholds
from tests.unit.chart.pod_security import violations
from tools.monitoring.rules import RULES_FILE, rules
from vcpo.api import VCPORun, missing_gpus

ENABLED = {"metrics": {"dashboards": {"enabled": True}}}
OBJECT_BYTES = 1 << 20
"""Largest object that etcd takes."""


def test_each_dashboard_is_in_a_config_map_byte_for_byte():
    committed = {path.name: path.read_text() for path in CHART.glob("files/dashboards/*.json")}
    rendered = {
        name: text for each in of_kind("ConfigMap", ENABLED) for name, text in each["data"].items()
    }
    assert rendered == committed
    assert len(committed) == 4


def test_labels_namespace_and_folder_are_those_of_the_values():
    for config_map in of_kind("ConfigMap", EVERYTHING):
        metadata = config_map["metadata"]
        assert metadata["labels"]["team"] == "ml"
        assert metadata["namespace"] == "monitoring"
        assert metadata["annotations"] == {"grafana_folder": "Training: VCPO"}


def test_a_config_map_fits_into_an_object_with_room_to_grow():
    for config_map in of_kind("ConfigMap", ENABLED):
        assert sum(map(len, config_map["data"].values())) < OBJECT_BYTES / 4


KEEP = {"helm.sh/resource-policy": "keep"}


def test_the_rendered_definition_is_the_committed_one_and_survives_an_uninstall():
    committed = YAML(typ="safe").load((CHART / "files/run.crd.yaml").read_text())
    (made,) = of_kind("CustomResourceDefinition")
    assert made["spec"] == committed["spec"]
    assert made["metadata"]["annotations"] == KEEP


def test_the_definition_can_be_left_to_somebody_else():
    assert of_kind("CustomResourceDefinition", {"crds": {"enabled": False}}) == []


FILES: dict[str, list[Manifest]] = {
    path.name: list(YAML(typ="safe").load_all(path.read_text())) for path in (DEFINITION, MANIFESTS)
}
DOCUMENTS = FILES["vcpo.yaml"]


def identity(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


@pytest.mark.parametrize(("path", "text"), [*rendered_files().items(), *chart_definition().items()])
def test_a_committed_file_is_what_the_chart_renders(path, text):
    assert path.read_text() == text, f"{path.name} is stale; fix: scripts.render_manifests"


def test_they_hold_every_object_of_the_chart_but_the_test_pod():
    expected = {identity(manifest) for manifest in render() if manifest["kind"] != "Pod"}
    found = {identity(manifest) for manifests in FILES.values() for manifest in manifests}
    assert found - {("Namespace", "vcpo-system")} == expected


def test_the_namespace_comes_first_and_enforces_the_restricted_profile():
    labels = DOCUMENTS[0]["metadata"]["labels"]
    assert identity(DOCUMENTS[0]) == ("Namespace", "vcpo-system")
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_nothing_in_them_claims_to_be_helms():
    text = MANIFESTS.read_text() + DEFINITION.read_text()
    assert "helm.sh" not in text
    assert "managed-by: Helm" not in text


VARIANTS = all_variants()


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_pod_passes_the_restricted_profile(values):
    pods = [operator_pod(values), *(pod["spec"] for pod in of_kind("Pod", values))]
    assert [violations(pod) for pod in pods] == [[] for _ in pods]


def test_only_the_operators_pod_holds_a_token_of_the_api_server():
    assert operator_pod()["automountServiceAccountToken"] is True
    assert of_kind("Pod")[0]["spec"]["automountServiceAccountToken"] is False
    assert of_kind("ServiceAccount")[0]["automountServiceAccountToken"] is False


def test_every_container_says_what_it_needs():
    containers = [operator_pod()["containers"][0], of_kind("Pod")[0]["spec"]["containers"][0]]
    for container in containers:
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]


TEST_POD = {
    "podSelector": {
        "matchLabels": {"app.kubernetes.io/instance": "vcpo", "app.kubernetes.io/component": "test"}
    }
}


def egress_to(port: int, values: Values | None = None) -> list[Any]:
    """Peers to which traffic on a port may go, one entry for each rule; None is anywhere."""
    rules = only("NetworkPolicy", values)["spec"]["egress"]
    return [rule.get("to") for rule in rules if port in {each["port"] for each in rule["ports"]}]


def ingress_from(port: str, values: Values | None = None) -> list[Any]:
    rules = only("NetworkPolicy", values)["spec"]["ingress"]
    return [rule.get("from") for rule in rules if port in {each["port"] for each in rule["ports"]}]


@pytest.mark.parametrize("port", [443, 6443, 8443, 16443])
def test_the_api_server_can_be_reached_where_clusters_put_it(port):
    assert egress_to(port) == [None]


def test_the_api_server_can_be_narrowed_to_addresses():
    values = {"networkPolicy": {"apiServer": {"cidrs": ["10.0.0.1/32"]}}}
    assert egress_to(6443, values) == [[{"ipBlock": {"cidr": "10.0.0.1/32"}}]]


def test_only_learners_can_be_called_on_their_port():
    (peers,) = egress_to(7600)
    assert peers == [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {"vcpo.dev/role": "learner"}}}
    ]


def test_nothing_else_can_be_reached():
    ports = {
        each["port"] for rule in only("NetworkPolicy")["spec"]["egress"] for each in rule["ports"]
    }
    assert ports == {53, 5353, 443, 6443, 8443, 16443, 7600}


def test_a_prometheus_that_is_asked_can_be_reached_on_the_port_of_its_pods():
    values = {"prometheus": {"url": "http://prometheus.monitoring", "podPort": 9095}}
    assert egress_to(9095, values) == [None]
    assert egress_to(9090) == []


def test_metrics_can_be_narrowed_and_the_chart_can_still_be_tested():
    peer = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
    values = {"networkPolicy": {"metricsFrom": [peer]}}
    assert ingress_from("metrics", values) == [[TEST_POD, peer]]


def test_the_test_pod_is_the_one_that_the_policy_lets_in():
    labels = only("Pod")["metadata"]["labels"].items()
    assert TEST_POD["podSelector"]["matchLabels"].items() <= labels


POLICY = only("ValidatingAdmissionPolicy")["spec"]


def asking(container, **resources):
    """A template whose container has resources."""
    return {"template": {"spec": {"containers": [{"name": container, "resources": resources}]}}}


LEARNERS = [
    {},
    {"gpusPerReplica": 2},
    {"precision": "bfloat16"},
    asking("learner", limits={"amd.com/gpu": 1}),
    asking("learner", requests={"cpu": 4, "rdma/hca": 1}),
    asking("other", limits={"nvidia.com/gpu": 1}),
    {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}},
]
GROUPS = [
    {},
    {"engine": "vllm"},
    {"engine": "vllm", "gpus": 0},
    {"gpus": 0, "tensorParallelSize": 2, "engine": "vllm"},
    {"gpus": 0, "engineArguments": {"enforce_eager": True}},
    {"gpus": 0, "kvCache": "keep"},
    {"gpus": 0, "kvCacheGibibytes": 2.0},
    {"engine": "my.engine:Engine"},
    {"gpus": 1},
    {"precision": "bfloat16"},
    asking("rollout", claims=[{"name": "gpu"}]),
    {"gpus": 0, **asking("rollout", limits={"nvidia.com/mig-1g.10gb": 1})},
]
MODELS = [{}, {"sizeBillions": 7}]
PODS = [{}, asking("rollout", limits={"nvidia.com/gpu": 1}), asking("learner", claims=[{}])]


@functools.cache
def program(expression):
    return cel.compile(expression)


def warnings(body):
    """Messages of the policy about a run, as the API server shows them."""
    known = {"object": body, "variables": {}}
    for variable in POLICY["variables"]:
        known["variables"][variable["name"]] = program(variable["expression"]).execute(known)
    for rule in POLICY["validations"]:
        if not program(rule["expression"]).execute(known):
            told = rule.get("messageExpression")
            yield rule["message"] if told is None else program(told).execute(known)


@pytest.mark.parametrize("learner", LEARNERS)
def test_the_api_server_warns_where_the_operator_does(learner):
    for group, model, pods in itertools.product(GROUPS, MODELS, PODS):
        groups = [{"name": "main", **group}, {"name": "other", "engine": "hf", "gpus": 0}]
        spec = {"model": {"name": "m", **model}, "learner": learner, "pods": pods}
        body = stored_run({**spec, "rollouts": groups})
        expected = [
            each.partition("ask")[0].split()[-1].strip("'")
            for each in missing_gpus(VCPORun.model_validate(body).spec)
        ]
        told = ["learner" if "learner" in each else each.split("'")[1] for each in warnings(body)]
        most = 2 if "learner" in expected else 1  # it names the first group
        assert told == expected[:most], (group, model, pods)


def test_a_run_that_the_policy_cannot_judge_is_admitted_and_none_is_refused():
    (binding,) = of_kind("ValidatingAdmissionPolicyBinding")
    assert POLICY["failurePolicy"] == "Ignore"
    assert binding["spec"]["validationActions"] == ["Warn", "Audit"]
    assert binding["spec"]["policyName"] == only("ValidatingAdmissionPolicy")["metadata"]["name"]


def test_without_cluster_wide_rights_there_is_no_policy():
    assert of_kind("ValidatingAdmissionPolicy", {"crds": {"enabled": False}}) == []


DOCKERFILES = {
    "operator": ROOT / "operator" / "Dockerfile",
    "learner": ROOT / "learner_svc" / "Dockerfile",
    "rollout": ROOT / "rollout_svc" / "Dockerfile",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPILING = ("learner", "rollout")
HEAVY = {"torch", "transformers", "safetensors", "vllm"}

each_image = pytest.mark.parametrize("image", DOCKERFILES)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instruction and arguments, comments dropped and continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines if line.strip()]


def final_stage(image: str) -> list[tuple[str, str]]:
    steps = instructions(DOCKERFILES[image])
    last = max(index for index, (word, _) in enumerate(steps) if word == "FROM")
    return steps[last:]


def arguments_of(word: str, steps: list[tuple[str, str]]) -> list[str]:
    return [arguments for each, arguments in steps if each == word]


def requirements(extra: str | None = None) -> list[Requirement]:
    listed = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return [Requirement(each) for each in listed]


@each_image
def test_the_process_is_a_numeric_nobody(image):
    assert arguments_of("USER", final_stage(image)) == ["65532:65532"]


@pytest.mark.parametrize("image", COMPILING)
def test_an_image_for_gpus_has_what_triton_compiles_with_and_a_name_of_its_user(image):
    (run,) = arguments_of("RUN", final_stage(image))
    assert {"gcc", "g++", "libc6-dev"} <= set(run.split())
    assert "useradd --uid 65532 --gid 65532" in run
    (environment,) = arguments_of("ENV", final_stage(image))
    assert "USER=vcpo" in environment.split()


@each_image
def test_the_base_is_one_exact_version_that_a_build_can_pin_by_digest(image):
    steps = instructions(DOCKERFILES[image])
    (base,) = [each for each in arguments_of("ARG", steps) if each.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(
        r"PYTHON_IMAGE=python:3\.11\.\d+-slim-bookworm(@sha256:[0-9a-f]{64})?", base
    )
    sources = {each.split(" AS ")[0] for each in arguments_of("FROM", steps)} - {"packages"}
    assert sources == {"${PYTHON_IMAGE}"}


@each_image
def test_every_package_is_installed_by_the_hash_that_a_lock_has(image):
    runs = " && ".join(arguments_of("RUN", instructions(DOCKERFILES[image])))
    installs = [run for run in re.findall(r"pip install ([^&]*)", runs) if "--no-index" not in run]
    assert len(installs) == 2
    for install in installs:
        assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(install.split())


@each_image
def test_an_image_installs_its_own_lock_and_starts_its_own_module(image):
    steps = instructions(DOCKERFILES[image])
    (lock,) = re.findall(rf"--requirement ({image}\S*)", " ".join(arguments_of("RUN", steps)))
    cpu = "${TORCH_INDEX_URL:+-cpu}"
    for name in {lock.replace(cpu, ""), lock.replace(cpu, "-cpu")}:
        assert f"deploy/locks/{name}" in " ".join(arguments_of("COPY", steps)).split()
    assert arguments_of("ENTRYPOINT", final_stage(image)) == [f'["python", "-m", "vcpo_{image}"]']


@each_image
def test_no_secret_is_an_argument_of_a_build(image):
    text = DOCKERFILES[image].read_text().upper()
    assert not any(word in text for word in ("TOKEN", "PASSWORD", "SECRET"))


def test_the_operators_image_holds_nothing_of_the_heavy_stack():
    names = {each.name for each in (*requirements(), *requirements("operator"))}
    assert names & HEAVY == set()
    assert "torch" not in " ".join(arguments_of("RUN", instructions(DOCKERFILES["operator"])))


SCHEMA = json.loads((CHART / "values.schema.json").read_text())
FIELDS = SCHEMA["properties"]["metrics"]["properties"]["prometheusRule"]["properties"]
ALERTS = sorted({rule.name for rule in rules() if rule.is_alert})


def values(**settings: object) -> Values:
    return {"metrics": {"prometheusRule": {"enabled": True, **settings}}}


def groups(**settings: object):
    return only("PrometheusRule", values(**settings))["spec"]["groups"]


def alerts(**settings: object):
    listed = [rule for group in groups(**settings) for rule in group["rules"]]
    return {rule["alert"]: rule for rule in listed if "alert" in rule}


def test_by_default_the_rules_are_those_of_the_file():
    assert groups() == YAML(typ="safe").load(RULES_FILE)["groups"]


@needs_promtool
def test_prometheus_accepts_what_helm_renders(tmp_path):
    rendered = tmp_path / "rules.json"
    numbers = dict.fromkeys(thresholds(), 1)
    rendered.write_text(json.dumps({"groups": groups(thresholds=numbers)}))
    assert promtool("check", "rules", rendered) == ""


@pytest.mark.parametrize("name", thresholds())
def test_a_threshold_of_the_values_replaces_its_number_everywhere(name):
    changed = json.dumps(groups(thresholds={name: 0.125 if thresholds()[name] < 1 else 7}))
    number = "0.125" if thresholds()[name] < 1 else "7"
    found = re.findall(rf"([0-9.]+)[,)]* +# threshold {name}\b", changed)
    assert found
    assert set(found) == {number}
    other = {each: value for each, value in thresholds().items() if each != name}
    for each, value in other.items():
        kept = re.findall(rf"([0-9.]+)[,)]* +# threshold {each}\b", changed)
        assert {float(number) for number in kept} == {value}


def test_the_values_the_schema_and_the_file_name_the_same_thresholds():
    listed = default_values()["metrics"]["prometheusRule"]["thresholds"]
    assert listed == thresholds()
    assert list(FIELDS["thresholds"]["properties"]) == list(thresholds())


def test_the_schema_names_every_alert():
    assert FIELDS["disabled"]["items"]["enum"] == ALERTS


def test_a_disabled_alert_is_left_out_whatever_its_severity():
    left = alerts(disabled=["VCPOStepsSkipped", "VCPORunFailed"])
    assert set(ALERTS) - set(left) == {"VCPOStepsSkipped", "VCPORunFailed"}


def test_recording_rules_stay_when_every_alert_is_disabled():
    left = groups(disabled=ALERTS)
    assert [group["name"] for group in left] == ["vcpo-recording"]


def test_an_alert_links_to_the_runbook_and_the_panel_at_the_users_addresses():
    annotations = alerts(
        runbookBaseUrl="https://wiki.example.com/vcpo/runbooks",
        grafanaUrl="https://grafana.example.com",
    )["VCPORunFailed"]["annotations"]
    assert annotations["runbook_url"] == "https://wiki.example.com/vcpo/runbooks#vcporunfailed"
    assert annotations["dashboard_url"].startswith("https://grafana.example.com/d/vcpo-run?")
    assert annotations["summary"] == "Run {{ $labels.run }} failed."


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "unknown alert": ({"disabled": ["VCPONoSuchAlert"]}, "/metrics/prometheusRule/disabled/0"),
    "unknown threshold": ({"thresholds": {"lowEss": 0.3}}, "lowEss"),
    "share above 1": ({"thresholds": {"lowRelativeEss": 30}}, "/thresholds/lowRelativeEss"),
    "duration for seconds": ({"thresholds": {"queueOldestSeconds": "2m"}}, "/queueOldestSeconds"),
    "address without a scheme": ({"grafanaUrl": "grafana.example.com"}, "/grafanaUrl"),
}


@pytest.mark.parametrize(("settings", "named"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_setting_is_refused_by_its_path(settings, named):
    with pytest.raises(helm_python.HelmValuesError, match=re.escape(named)):
        chart().validate_schema(values(**settings))
