"""The guide to Kubernetes says what is true of the operator and of the definition."""

from __future__ import annotations

import re

from ruamel.yaml import YAML

from tests.fixtures.chart.rendering import ROOT, of_kind
from vcpo.api import VCPORun, parse_run
from vcpo_operator.children import Kind, OperatorDefaults, build_children
from vcpo_operator.children.config import make_parent
from vcpo_operator.children.manifest import Owner
from vcpo_operator.names import RunKey
from vcpo_operator.observed.run_defaults import RunDefaults, merge_spec

GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()
SOURCES = "\n".join(
    path.read_text()
    for folder in (ROOT / "operator" / "vcpo_operator", ROOT / "core" / "vcpo" / "control")
    for path in sorted(folder.rglob("*.py"))
)

OF_NODES = {"Terminated"}
"""Reasons that a node gives when it shuts down; the operator passes them on."""
OF_OTHERS = {"minMember"}
"""Fields of objects that are not ours: a `PodGroup`."""


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", GUIDE, flags=re.M | re.S)
    return text


def first_cells(text: str) -> list[str]:
    """First column of a section's table, without its heading."""
    rows = re.findall(r"^\| (.*?) \|", text, flags=re.M)
    return [cell for cell in rows[1:] if not cell.startswith("---")]


def conditions() -> list[tuple[str, str]]:
    """Pairs of condition and reason in the table of troubles; `...` repeats the row before."""
    pairs, types = [], []
    for cell in first_cells(section("Troubleshooting")):
        if "`" not in cell:
            continue
        named = re.findall(r"[A-Z]\w+", cell.split("`")[0])
        types = named or types
        pairs += [(kind, reason) for kind in types for reason in re.findall(r"`(\w+)`", cell)]
    return pairs


def guides_run() -> VCPORun:
    text, *_ = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.S)
    return parse_run(text, source="docs/kubernetes.md")


def guides_large_run() -> VCPORun:
    """The guide's run with the fields of a learner of several pods."""
    texts = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.S)
    run, fields = (YAML(typ="safe").load(text) for text in (texts[0], texts[3]))
    run["spec"].update(fields["spec"])
    return VCPORun.model_validate(run)


def definition_of_runs():
    names = {each["metadata"]["name"]: each for each in of_kind("CustomResourceDefinition")}
    return names["vcporuns.vcpo.dev"]


def test_every_pod_of_the_guides_run_gets_the_gpu_it_asks_for():
    owner = Owner(key=RunKey("team-a", "countdown"), uid="u")
    defaults = OperatorDefaults(learner_image="l", rollout_image="r")
    made = build_children(make_parent(guides_run(), owner), defaults)
    workloads = [each for each in made if each.kind in {Kind.STATEFUL_SET, Kind.DEPLOYMENT}]
    assert len(workloads) == 2
    for workload in workloads:
        (container,) = workload.manifest["spec"]["template"]["spec"]["containers"]
        memory = {"learner": "48Gi", "rollout": "32Gi"}[container["name"]]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 1, "memory": memory}
        assert container["image"] in {"l", "r"}


def test_the_guides_large_learner_has_its_pods_gpus_and_volume():
    owner = Owner(key=RunKey("team-a", "countdown"), uid="u")
    defaults = OperatorDefaults(learner_image="l", rollout_image="r")
    made = build_children(make_parent(guides_large_run(), owner), defaults)
    (learner,) = [each.manifest["spec"] for each in made if each.kind is Kind.STATEFUL_SET]
    (container,) = learner["template"]["spec"]["containers"]
    assert learner["replicas"] == 2
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    (claim,) = [each.manifest["spec"] for each in made if each.kind is Kind.CLAIM]
    assert claim["accessModes"] == ["ReadWriteMany"]
    # 7.6 B parameters: 12 bytes in four checkpoints (two, the best, the next one), 4 in the model;
    # and 4 GiB for the redo log, twice.
    assert claim["resources"]["requests"]["storage"] == "377Gi"


def test_the_guides_defaults_fit_its_run():
    texts = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.S)
    layer = RunDefaults.of(YAML(typ="safe").load(texts[2]))
    document = guides_run().model_dump(mode="json", by_alias=True)
    document["spec"], origins = merge_spec(document["spec"], [layer])
    run = VCPORun.model_validate(document)
    assert run.spec.pods.network_isolation == "DenyAll"
    assert {each.field for each in origins} == {
        "ttlSecondsAfterFinished",
        "pods.imagePullSecrets",
        "pods.template",
        "pods.networkIsolation",
    }


def test_the_guide_explains_every_column_in_order():
    version = definition_of_runs()["spec"]["versions"][0]
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    explained = ", ".join(first_cells(section("What the columns mean"))).split(", ")
    assert explained == [column for column in columns if column != "Age"]


def test_every_condition_and_reason_of_the_guide_is_one_that_is_set():
    words = {word for pair in conditions() for word in pair}
    assert len(words) > 10
    assert [word for word in sorted(words - OF_NODES) if f'"{word}"' not in SOURCES] == []


def test_every_file_the_guide_names_is_there():
    paths = re.findall(r"(?<=[ `(/])((?:charts|deploy|operator|\w+_svc)/[\w./]+)", GUIDE)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_field_the_guide_names_is_in_the_definition_or_a_value_of_the_chart():
    values = (ROOT / "charts" / "vcpo" / "values.yaml").read_text()
    known = set(re.findall(r"\w+", str(definition_of_runs()["spec"]["versions"][0]["schema"])))
    known |= set(re.findall(r"\w+(?=:)", values))
    quoted = " ".join(re.findall(r"`([^`\n]+)`", GUIDE))
    fields = set(re.findall(r"\b[a-z]+(?:[A-Z][a-z]+)+\b", quoted))
    assert {"minReplicas", "maxLearnerRestarts"} <= fields
    assert fields - known == OF_OTHERS
