"""The manifests of a run's objects are valid, restricted, and change only with their inputs."""

from dataclasses import replace
from datetime import date
from typing import Any

import kubernetes_validate
import pytest

from tests.fixtures.chart.monitor_schemas import validate_monitor
from tests.fixtures.operator.runs import DEFAULTS, KEY, document, parent, template_digest
from tests.unit.chart.pod_security import violations
from vcpo.api import parse_run
from vcpo_operator.children import Child, Kind, build_children
from vcpo_operator.children.pod_template.template import moving_images
from vcpo_operator.children.revision import run_file
from vcpo_operator.names import (
    QUEUE_LABEL,
    RUN_LABEL,
    TEMPLATE_HASH_ANNOTATION,
    RunKey,
    certificate_hosts,
)
from vcpo_operator.observed.parse import parse_run_record
from vcpo_operator.reconcile.memory import RunMemory

EVERYTHING = {
    "pods": {
        "queueName": "gpus",
        "keysSecretName": "run-keys",
        "networkIsolation": "DenyAll",
        "extraEgress": [{"port": 443}],
    },
    "tracking": {"secretName": "wandb", "sinks": [{"name": "wandb"}]},
    "learner": {
        "threads": 4,
        "checkpointStorageClassName": "fast",
        "template": {
            "spec": {
                "nodeSelector": {"gpu": "h200"},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "containers": [{"name": "learner", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
            }
        },
    },
    "rollouts": [{"name": "main", "threads": 2}, {"name": "extra", "image": "mine:1"}],
}


TWO_PODS_OF_FOUR = {"learner": {"replicas": 2, "gpusPerReplica": 4, "drainSeconds": 60}}
THREE_PODS_OF_ONE = {"learner": {"replicas": 3}}
ONE_POD_OF_TWO = {"learner": {"processes": 2}}
IN_STORE = {"weights": {"storeUrl": "s3://bucket/versions"}}


def build(**spec: Any) -> dict[str, Child]:
    return {
        f"{each.kind.kind} {each.name}": each for each in build_children(parent(**spec), DEFAULTS)
    }


def pod_spec(child: Child) -> dict[str, Any]:
    return child.manifest["spec"]["template"]["spec"]


def pod_annotations(child: Child) -> dict[str, str]:
    return child.manifest["spec"]["template"]["metadata"]["annotations"]


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize(
    "spec",
    [{}, EVERYTHING, TWO_PODS_OF_FOUR, THREE_PODS_OF_ONE, ONE_POD_OF_TWO],
    ids=["defaults", "everything", "2 pods of 4", "3 pods of 1", "1 pod of 2"],
)
def test_kubernetes_knows_every_field_of_every_child(spec: dict[str, Any], version: str):
    for child in build(**spec).values():
        kubernetes_validate.validate(child.manifest, version, strict=True)


@pytest.mark.parametrize("name", ["StatefulSet demo-learner", "Deployment demo-rollout-main"])
def test_pods_pass_the_restricted_standard(name: str):
    assert violations(pod_spec(build()[name])) == []


def test_no_pod_holds_a_token_of_the_api_server():
    family = build()
    assert family["ServiceAccount demo-workload"].manifest["automountServiceAccountToken"] is False
    for name in ("StatefulSet demo-learner", "Deployment demo-rollout-main"):
        assert pod_spec(family[name])["automountServiceAccountToken"] is False


def variables_of(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def learner_container(**spec: Any) -> dict[str, Any]:
    (container,) = pod_spec(build(**spec)["StatefulSet demo-learner"])["containers"]
    return container


def test_pods_of_several_ranks_meet_in_the_first_pod_by_torchrun():
    family = build(**TWO_PODS_OF_FOUR)
    container = learner_container(**TWO_PODS_OF_FOUR)
    assert container["command"][3:12] == [
        "torch.distributed.run",
        "--nnodes=2",
        "--node-rank=$(POD_INDEX)",
        "--master-addr=demo-learner-0.demo-learner-ranks",
        "--master-port=29500",
        "--nproc-per-node=4",
        "-m",
        "vcpo_learner",
        "/etc/vcpo/run.yaml",
    ]
    stateful_set = family["StatefulSet demo-learner"].manifest["spec"]
    assert (stateful_set["replicas"], stateful_set["serviceName"]) == (2, "demo-learner-ranks")
    assert stateful_set["podManagementPolicy"] == "Parallel"
    service = family["Service demo-learner-ranks"].manifest["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    template_labels = stateful_set["template"]["metadata"]["labels"]
    assert service["selector"].items() <= template_labels.items()


def test_every_rank_has_a_port_and_every_pod_a_name_at_which_it_sends_weights():
    family, container = build(**TWO_PODS_OF_FOUR), learner_container(**TWO_PODS_OF_FOUR)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    sending = {name: port for name, port in ports.items() if name.startswith("weights")}
    assert sending == {"weights": 7620, "weights-1": 7621, "weights-2": 7622, "weights-3": 7623}
    assert len(set(ports.values())) == len(ports)
    (host,) = (each for each in container["command"] if each.startswith("--weights-host="))
    pod, dot, service = host.removeprefix("--weights-host=").partition(".")
    assert (pod, dot) == ("$(POD_NAME)", ".")
    namespace = family["StatefulSet demo-learner"].manifest["metadata"]["namespace"]
    assert service == f"demo-learner-ranks.{namespace}.svc"
    certified = certificate_hosts(RunKey(namespace, "demo"))["learner"]
    assert f"*.{service}" in certified
    assert "weights" in {
        each["name"] for each in family["Service demo-learner"].manifest["spec"]["ports"]
    }
    assert "POD_NAME" in variables_of(container)


def test_torchrun_leaves_its_ranks_the_time_to_drain_and_the_kubelet_their_cause():
    variables = variables_of(learner_container(**TWO_PODS_OF_FOUR))
    grace_s = pod_spec(build(**TWO_PODS_OF_FOUR)["StatefulSet demo-learner"])[
        "terminationGracePeriodSeconds"
    ]
    assert 60 < int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace_s == 90
    assert variables["VCPO_TERMINATION_LOG"] == "/dev/termination-log"


def test_a_pod_of_one_rank_has_its_place_in_its_environment():
    container = learner_container(**THREE_PODS_OF_ONE)
    assert container["command"][:3] == ["python", "-m", "vcpo_learner"]
    variables = variables_of(container)
    assert variables["POD_INDEX"] == {
        "fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}
    }
    given = {name: variables[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    assert given == {
        "RANK": "$(POD_INDEX)",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "MASTER_PORT": "29500",
    }
    assert variables["MASTER_ADDR"] == "demo-learner-0.demo-learner-ranks"
    # A reference to a variable is filled in only if that one comes before it.
    names = [each["name"] for each in container["env"]]
    assert names.index("POD_INDEX") < names.index("RANK")


def test_one_pod_of_several_ranks_needs_no_service_of_its_own_to_meet():
    assert learner_container(**ONE_POD_OF_TWO)["command"][:10] == [
        *("python", "-m", "vcpo.service.process", "torch.distributed.run"),
        "--nnodes=1",
        "--master-addr=127.0.0.1",
        "--master-port=29500",
        "--nproc-per-node=2",
        "-m",
        "vcpo_learner",
    ]
    assert "Service demo-learner-ranks" not in build(**ONE_POD_OF_TWO)


@pytest.mark.parametrize(
    ("spec", "is_shared"),
    [({}, True), (IN_STORE, False), (IN_STORE | ONE_POD_OF_TWO, True), (TWO_PODS_OF_FOUR, True)],
)
def test_learners_have_memory_for_the_files_of_weights_and_to_exchange_tensors(spec, is_shared):
    pod = pod_spec(build(**spec)["StatefulSet demo-learner"])
    shared = [each for each in pod["volumes"] if each.get("emptyDir") == {"medium": "Memory"}]
    mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
    assert ("/dev/shm" in mounts) is is_shared
    assert [each["name"] for each in shared] == ([mounts["/dev/shm"]] if is_shared else [])


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_worker_whose_engine_splits_the_model_has_the_gpus_and_the_memory_to_exchange(gpus):
    groups = [{"name": "main", "engine": "vllm", "tensorParallelSize": gpus}]
    pod = pod_spec(build(rollouts=groups)["Deployment demo-rollout-main"])
    (container,) = pod["containers"]
    mounts = [each["mountPath"] for each in container["volumeMounts"]]
    asked = container["resources"]["limits"].get("nvidia.com/gpu")
    assert asked == gpus
    assert ("/dev/shm" in mounts) is (gpus == 2)


@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        ({}, "ReadWriteOnce"),
        (ONE_POD_OF_TWO, "ReadWriteOnce"),
        (THREE_PODS_OF_ONE, "ReadWriteMany"),
    ],
)
def test_several_pods_write_into_one_volume(spec, mode):
    claim = build(**spec)["PersistentVolumeClaim demo-learner"].manifest["spec"]
    assert claim["accessModes"] == [mode]


def test_workers_reach_the_pod_of_rank_0_and_no_other():
    selector = build(**TWO_PODS_OF_FOUR)["Service demo-learner"].manifest["spec"]["selector"]
    assert selector["apps.kubernetes.io/pod-index"] == "0"


def test_a_worker_knows_its_learner_its_group_and_its_own_name():
    (container,) = pod_spec(build()["Deployment demo-rollout-main"])["containers"]
    assert {"--learner=demo-learner:7600", "--group=main", "--worker-id=$(POD_NAME)"} <= set(
        container["command"]
    )
    assert {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}} in (
        container["env"]
    )


def test_the_keys_of_the_tracking_secret_are_variables_of_the_learner_alone():
    made = build(tracking={"secretName": "wandb", "sinks": [{"name": "wandb"}]})
    (learner,) = pod_spec(made["StatefulSet demo-learner"])["containers"]
    (worker,) = pod_spec(made["Deployment demo-rollout-main"])["containers"]
    assert learner["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert "envFrom" not in worker


def test_a_pod_has_longer_to_leave_than_its_process_takes_to_drain():
    assert pod_spec(build()["StatefulSet demo-learner"])["terminationGracePeriodSeconds"] == 150
    assert pod_spec(build()["Deployment demo-rollout-main"])["terminationGracePeriodSeconds"] == 90


@pytest.mark.parametrize("name", ["StatefulSet demo-learner", "Deployment demo-rollout-main"])
def test_a_pod_that_answers_is_known_to_within_seconds_and_may_take_an_hour_to_start(name: str):
    (container,) = pod_spec(build()[name])["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] == 2
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600


def test_a_template_cannot_take_our_labels_away():
    template = {"metadata": {"labels": {RUN_LABEL: "other", "team": "blue"}}}
    child = build(rollouts=[{"name": "main", "template": template}])["Deployment demo-rollout-main"]
    labels = child.manifest["spec"]["template"]["metadata"]["labels"]
    assert (labels[RUN_LABEL], labels["team"]) == ("demo", "blue")


def test_a_queue_admits_the_learner_and_groups_of_a_fixed_size_as_one_unit():
    groups = [
        {"name": "base", "minReplicas": 4, "maxReplicas": 4},
        {"name": "more", "minReplicas": 0, "maxReplicas": 8},
    ]
    made = build(pods={"queueName": "gpus"}, learner={"replicas": 2}, rollouts=groups)
    unit = {"kueue.x-k8s.io/pod-group-name": "demo-learner-6"}
    for name in ("StatefulSet demo-learner", "Deployment demo-rollout-base"):
        template = made[name].manifest["spec"]["template"]["metadata"]
        assert QUEUE_LABEL not in made[name].manifest["metadata"]["labels"]
        assert {QUEUE_LABEL: "gpus", **unit}.items() <= template["labels"].items()
        assert template["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "6"
        assert template["annotations"]["kueue.x-k8s.io/pod-group-serving"] == "true"
    own = made["Deployment demo-rollout-more"].manifest
    assert own["metadata"]["labels"][QUEUE_LABEL] == "gpus"
    assert not unit.keys() & own["spec"]["template"]["metadata"]["labels"].keys()


@pytest.mark.parametrize(
    ("workload", "port"),
    [("StatefulSet demo-learner", 7602), ("Deployment demo-rollout-main", 7612)],
)
def test_pods_are_probed_in_plain_text_on_a_port_of_their_own(workload, port):
    (container,) = pod_spec(build()[workload])["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"] == {"port": port}
    assert {"name": "health", "containerPort": port} in container["ports"]
    assert f"--health-listen=0.0.0.0:{port}" in container["command"]


@pytest.mark.parametrize("workload", ["StatefulSet demo-learner", "Deployment demo-rollout-main"])
def test_pods_mount_the_certificate_that_the_run_names(workload):
    pods = pod_spec(build(pods={"tlsSecretName": "mine"})[workload])
    (volume,) = (each["secret"] for each in pods["volumes"] if each["name"] == "certificates")
    assert volume["secretName"] == "mine"
    assert {each["key"] for each in volume["items"]} == {"ca.crt", "tls.crt", "tls.key"}


@pytest.mark.parametrize(
    ("workload", "held"),
    [
        (
            "StatefulSet demo-learner",
            {"VCPO_WORKER_KEY": "worker", "VCPO_STEERING_KEY": "steering"},
        ),
        ("Deployment demo-rollout-main", {"VCPO_WORKER_KEY": "worker"}),
    ],
)
def test_a_pod_has_the_keys_of_its_roles_and_no_others(workload, held):
    (container,) = pod_spec(build(**EVERYTHING)[workload])["containers"]
    references = {
        each["name"]: each["valueFrom"]["secretKeyRef"]
        for each in container["env"]
        if "secretKeyRef" in each.get("valueFrom", {})
    }
    assert references == {
        variable: {"name": "run-keys", "key": key} for variable, key in held.items()
    }


def test_isolated_pods_still_reach_each_other_and_dns():
    spec = build(**EVERYTHING)["NetworkPolicy demo"].manifest["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    to_run, to_dns, _ = spec["egress"]
    assert to_run == {"to": [{"podSelector": {"matchLabels": {RUN_LABEL: "demo"}}}]}
    # Kubernetes' DNS pods listen on 53, OpenShift's on 5353.
    assert {(each["protocol"], each["port"]) for each in to_dns["ports"]} == {
        *(("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353))
    }


def test_a_pod_that_does_not_work_never_keeps_its_node_from_being_drained():
    budgets = [each.manifest["spec"] for name, each in build().items() if "Budget" in name]
    assert [each["unhealthyPodEvictionPolicy"] for each in budgets] == ["AlwaysAllow"] * 2
    assert [each["maxUnavailable"] for each in budgets] == [1, "50%"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"terminationGracePeriodSeconds": None}, "is 30 s; leave it out"),
        ({"terminationGracePeriodSeconds": 89}, "is 89 s; leave it out, or set `drainSeconds` to"),
        ({"containers": [{"name": "rolout", "env": []}]}, "`rollout` is the run's own"),
        (
            {"containers": [{"name": "rollout", "env": [{"name": "A", "value": 1}]}]},
            r"`spec.containers\[rollout\].env\[A\].value` is 1; write it in quotes",
        ),
        ({"containers": [{"name": "rollout", "image": "UP/A:1"}]}, "'UP/A:1' is not an image"),
    ],
)
def test_a_template_whose_pods_would_not_start_or_not_save_is_refused_with_the_fix(spec, told):
    with pytest.raises(ValueError, match=rf"^spec.rollouts\[main\](.template)?: .*{told}"):
        build(rollouts=[{"name": "main", "template": {"spec": spec}}])


@pytest.mark.parametrize(
    ("image", "container", "is_told"),
    [
        ("reg:5000/l", {}, True),
        ("reg/l:latest", {"imagePullPolicy": "IfNotPresent"}, True),
        ("reg/l:latest", {"imagePullPolicy": "Always"}, False),
        ("reg:5000/l:1", {}, False),
        ("reg/l@sha256:" + "a" * 64, {}, False),
    ],
)
def test_an_image_that_may_be_another_one_tomorrow_is_told(image, container, is_told):
    template = {"spec": {"containers": [{"name": "learner", **container}]}}
    children = build(learner={"image": image, "template": template}).values()
    assert [image in each for each in moving_images(children)] == [True] * is_told


def test_a_monitor_is_made_when_asked_for():
    monitor = build(pods={"podMonitor": True})["PodMonitor demo"].manifest
    validate_monitor(monitor)
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"


def test_a_run_gets_no_monitor_of_its_own_beside_the_charts():
    shared = replace(DEFAULTS, shared_pod_monitor=True)
    made = build_children(parent(pods={"podMonitor": True}), shared)
    assert Kind.POD_MONITOR not in {each.kind for each in made}


@pytest.mark.parametrize(
    ("name", "port"),
    [("StatefulSet demo-learner", "7601"), ("Deployment demo-rollout-main", "7611")],
)
def test_a_prometheus_without_its_operator_finds_every_pod(name: str, port: str):
    annotations = pod_annotations(build()[name])
    assert annotations.pop(TEMPLATE_HASH_ANNOTATION)
    assert annotations == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": port,
        "prometheus.io/path": "/metrics",
    }


def test_scrape_annotations_can_be_left_out_of_all_runs_and_changed_by_one():
    (learner,) = (
        each
        for each in build_children(parent(), replace(DEFAULTS, scrape_annotations=False))
        if each.kind is Kind.STATEFUL_SET
    )
    assert set(pod_annotations(learner)) == {TEMPLATE_HASH_ANNOTATION}
    template = {"metadata": {"annotations": {"prometheus.io/scrape": "false"}}}
    changed = pod_annotations(build(learner={"template": template})["StatefulSet demo-learner"])
    assert changed["prometheus.io/scrape"] == "false"


def test_the_operators_environment_reaches_every_pod_and_a_template_may_change_it():
    defaults = replace(DEFAULTS, pod_environment={"VCPO_EXAMPLE": "all"})
    own = {"name": "rollout", "env": [{"name": "VCPO_EXAMPLE", "value": "mine"}]}
    changed = {"name": "main", "template": {"spec": {"containers": [own]}}}
    made = build_children(parent(rollouts=[changed, {"name": "extra"}]), defaults)
    values = {
        each.name: {item["name"]: item.get("value") for item in containers[0]["env"]}
        for each in made
        if each.kind in {Kind.STATEFUL_SET, Kind.DEPLOYMENT}
        and (containers := pod_spec(each)["containers"])
    }
    assert all("POD_NAMESPACE" in env for env in values.values())
    assert {name: env["VCPO_EXAMPLE"] for name, env in values.items()} == {
        "demo-learner": "all",
        "demo-rollout-main": "mine",
        "demo-rollout-extra": "all",
    }


def test_pods_that_ask_for_gpus_compute_in_bfloat16_and_generate_with_vllm():
    asking = {"containers": [{"name": "rollout", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}
    groups = [{"name": "main", "template": {"spec": asking}}, {"name": "extra"}]
    spec = parse_run(parent(learner={"gpusPerReplica": 1}, rollouts=groups).run_file).spec
    assert spec.learner.precision == "bfloat16"
    assert [(group.precision, group.engine) for group in spec.rollouts] == [
        ("bfloat16", "vllm"),
        ("float32", "hf"),
    ]


@pytest.mark.parametrize(
    "spec",
    [
        {"suspend": True},
        {"activeDeadlineSeconds": 9},
        {"pendingDeadlineSeconds": 9},
        {"control": {"pollSeconds": 9}},
        {"failurePolicy": {"maxLearnerRestarts": 9}},
        {"pods": {"podMonitor": True}},
        {"learner": {"image": "mine:1", "drainSeconds": 9}},
        {"rollouts": [{"name": "main", "minReplicas": 0, "maxReplicas": 9}]},
    ],
)
def test_what_no_process_reads_is_not_in_the_run_file(spec: dict[str, Any]):
    assert run_file(parent(**spec).run) == parent().run_file


def test_the_run_file_says_on_which_day_the_object_was_created():
    body = {
        "metadata": {
            "namespace": KEY.namespace,
            "name": KEY.name,
            "uid": "u",
            "creationTimestamp": "2026-07-26T23:59:59Z",
            "annotations": {"of": "others"},
        },
        "spec": document()["spec"],
    }
    record = parse_run_record(body)
    run = RunMemory(uid="u", first_seen_s=0.0).validated_run(record)
    file = parse_run(run_file(run))
    assert file.start_date == date(2026, 7, 26)
    assert len(file.metadata.annotations) == 1


@pytest.mark.parametrize("spec", [{"steps": 11}, {"optimizer": {"learningRate": 1e-5}}])
def test_what_processes_read_makes_new_pods(spec: dict[str, Any]):
    for name in ("StatefulSet demo-learner", "Deployment demo-rollout-main"):
        assert template_digest(build()[name]) != template_digest(build(**spec)[name])
