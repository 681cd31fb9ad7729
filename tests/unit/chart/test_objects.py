"""What the chart renders is valid, labelled and in its place, whatever the values."""

import functools
import json

import helm_python
import kubernetes_validate
import pytest

from tests.fixtures.chart.monitor_schemas import KINDS, validate_monitor
from tests.fixtures.chart.rendering import CHART, NAMESPACE, of_kind, only, operator_pod, render
from tests.fixtures.chart.variants import EVERYTHING, all_variants

VARIANTS = all_variants()


@functools.cache
def validate(manifest, version):
    """Once for each text: most objects are the same under most values."""
    kubernetes_validate.validate(json.loads(manifest), version, strict=True)


each_variant = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())


@each_variant
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_every_object_is_valid_kubernetes(values, version):
    for manifest in render(values):
        if manifest["kind"] not in KINDS:
            validate(json.dumps(manifest), version)


@each_variant
def test_every_object_of_the_prometheus_operator_is_valid(values):
    for manifest in render(values):
        if manifest["kind"] in KINDS:
            validate_monitor(manifest)


@each_variant
def test_helm_lint_has_nothing_to_say(values):
    report = helm_python.lint(CHART, values, strict=True)
    assert (report["messages"], report["errors"]) == ([], [])


@each_variant
def test_every_object_carries_the_recommended_labels(values):
    for manifest in render(values):
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "vcpo"
        assert labels["app.kubernetes.io/instance"] == "vcpo"
        assert labels["app.kubernetes.io/component"] in {"operator", "test"}


@each_variant
def test_the_operators_pod_matches_every_selector_that_means_it(values):
    pod = only("Deployment", values)["spec"]["template"]["metadata"]["labels"].items()
    selectors = [only("Deployment", values)["spec"]["selector"]["matchLabels"]]
    selectors += [service["spec"]["selector"] for service in of_kind("Service", values)]
    selectors += [
        policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind("NetworkPolicy", values)
    ]
    assert all(selector.items() <= pod for selector in selectors)


@each_variant
def test_nothing_carries_a_finalizer_that_could_hold_up_an_uninstall(values):
    assert not any("finalizers" in manifest["metadata"] for manifest in render(values))


def test_selectors_survive_an_upgrade_of_the_chart():
    selector = only("Deployment")["spec"]["selector"]["matchLabels"]
    assert set(selector) == {
        "app.kubernetes.io/name",
        "app.kubernetes.io/instance",
        "app.kubernetes.io/component",
    }


def test_two_operators_are_never_active_together_during_an_upgrade():
    spec = only("Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_an_image_is_named_by_registry_repository_and_version():
    images = {"registry": "registry.example.com/ml", "operator": {"tag": "1.2"}}
    container = operator_pod({"images": images})["containers"][0]
    assert container["image"] == "registry.example.com/ml/vcpo-operator:1.2"


def test_a_digest_wins_over_a_tag():
    image = {"tag": "1.2", "digest": "sha256:" + "0" * 64}
    container = operator_pod({"images": {"operator": image}})["containers"][0]
    assert container["image"] == "vcpo-operator@sha256:" + "0" * 64


def test_monitors_carry_the_labels_prometheus_selects_by():
    for kind in ("PodMonitor", "ServiceMonitor"):
        assert only(kind, EVERYTHING)["metadata"]["labels"]["release"] == "prometheus"


def test_the_service_monitor_selects_the_metrics_service():
    monitor = only("ServiceMonitor", EVERYTHING)["spec"]
    service = only("Service", EVERYTHING)
    labels = service["metadata"]["labels"].items()
    assert monitor["selector"]["matchLabels"].items() <= labels
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert monitor["namespaceSelector"] == {"matchNames": [NAMESPACE]}
