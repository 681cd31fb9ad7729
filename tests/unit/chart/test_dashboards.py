"""ConfigMaps hold the committed dashboards unchanged, where and as the sidecar of Grafana looks."""

from __future__ import annotations

from tests.fixtures.chart.rendering import CHART, NAMESPACE, of_kind
from tests.fixtures.chart.variants import EVERYTHING

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


def test_the_sidecar_finds_them_by_its_usual_label_in_the_namespace_of_the_release():
    for config_map in of_kind("ConfigMap", ENABLED):
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert config_map["metadata"]["namespace"] == NAMESPACE
        assert "annotations" not in config_map["metadata"]


def test_labels_namespace_and_folder_are_those_of_the_values():
    for config_map in of_kind("ConfigMap", EVERYTHING):
        metadata = config_map["metadata"]
        assert metadata["labels"]["team"] == "ml"
        assert metadata["namespace"] == "monitoring"
        assert metadata["annotations"] == {"grafana_folder": "Training: VCPO"}


def test_a_config_map_fits_into_an_object_with_room_to_grow():
    for config_map in of_kind("ConfigMap", ENABLED):
        assert sum(map(len, config_map["data"].values())) < OBJECT_BYTES / 4
