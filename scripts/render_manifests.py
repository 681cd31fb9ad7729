"""Write the chart's definition and boards, and the files of ``deploy/``; ``--check`` only compares.

Without Helm one applies the definition of VCPORun, a file of the chart, and ``deploy/vcpo.yaml``:
the operator in the namespace ``vcpo-system``, which it also creates. The definition has a file of
its own because deleting it deletes every run: ``kubectl delete -f deploy/vcpo.yaml`` must remove
the operator and no run. Left out is what only
Helm understands: its labels, its test pod, and the annotation that keeps them on uninstall. A board
of ``tools/monitoring/dashboards`` is one file of JSON for Grafana.
"""

import argparse
import json
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any, Final

import helm_python
from ruamel.yaml import YAML

from tools.monitoring.dashboards import BOARDS
from tools.monitoring.dashboards.grafana import to_grafana
from vcpo_operator.crd import run_crd, to_yaml

ROOT: Final = Path(__file__).resolve().parent.parent
CHART: Final = ROOT / "charts" / "vcpo"
DEFINITION: Final = CHART / "files" / "run.crd.yaml"
DASHBOARDS: Final = CHART / "files" / "dashboards"
MANIFESTS: Final = ROOT / "deploy" / "vcpo.yaml"

POD_TEMPLATE: Final = ROOT / "operator" / "vcpo_operator" / "crd" / "pod_template.json"
_KUBERNETES: Final = "v1.37.0-local"
_CORE: Final = "io.k8s.api.core.v1."
_LEVELS: Final = 3
_KINDS: Final = ("string", "integer", "boolean", "array")
_CHOICES: Final = {
    "Container.imagePullPolicy": "Always|IfNotPresent|Never",
    "Container.terminationMessagePolicy": "File|FallbackToLogsOnError",
    "PodSpec.dnsPolicy": "ClusterFirst|ClusterFirstWithHostNet|Default|None",
    "PodSpec.preemptionPolicy": "Never|PreemptLowerPriority",
    "PodSpec.restartPolicy": "Always|Never|OnFailure",
    "Toleration.effect": "|NoExecute|NoSchedule|PreferNoSchedule",
    "Toleration.operator": "|Equal|Exists|Gt|Lt",
    "TopologySpreadConstraint.whenUnsatisfiable": "DoNotSchedule|ScheduleAnyway",
}
"""Choices of fields, which Kubernetes' published schema does not have; empty is the default."""

_HEADER = """\
# The VCPO operator with the chart's defaults. Generated: python -m scripts.render_manifests
#   kubectl apply --server-side --force-conflicts -f charts/vcpo/files/run.crd.yaml
#   kubectl apply --server-side --force-conflicts -f deploy/vcpo.yaml
# Deleting these objects removes the operator and its namespace; runs in other namespaces go on.
"""
_NAMESPACE = """\
apiVersion: v1
kind: Namespace
metadata:
  name: vcpo-system
  labels:
    app.kubernetes.io/part-of: vcpo
    pod-security.kubernetes.io/enforce: restricted"""
_KIND_ORDER = (
    *("Namespace", "CustomResourceDefinition", "ServiceAccount", "ClusterRole"),
    *("ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    *("Role", "RoleBinding", "Service", "NetworkPolicy", "Deployment"),
)
_HELM_LABEL = re.compile(r"^ +(helm\.sh/chart: .*|app\.kubernetes\.io/managed-by: Helm)\n", re.M)


def rendered_documents() -> list[str]:
    """The chart's default objects as YAML, one text each, without notes and hooks."""
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render({"crds": {"keep": False}}, name="vcpo", namespace="vcpo-system")
    texts = [text for name, text in sorted(files.items()) if not name.endswith("NOTES.txt")]
    documents = [part.strip() for text in texts for part in re.split(r"^---$", text, flags=re.M)]
    return [document for document in documents if document and "helm.sh/hook:" not in document]


def pod_template_fields() -> dict[Path, str]:
    """Text of the names and types of a pod template's fields, as `vcpo_operator.crd` reads them."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / _KUBERNETES
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    fields = {
        "metadata": {"annotations": "any", "labels": "any"},
        "spec": _fields({"$ref": f"#/$defs/{_CORE}PodSpec"}, definitions, _LEVELS - 1),
    }
    return {POD_TEMPLATE: json.dumps(fields, indent=1) + "\n"}


def _fields(node: dict[str, Any], definitions: dict[str, Any], levels: int) -> Any:
    """The short form of a schema, `levels` deep."""
    name = node.get("$ref", "").rpartition("/")[2]
    node = definitions[name] if name else node
    kind = next((each for each in _KINDS if each in node.get("type", ())), "any")
    if node.get("properties"):
        if levels == 0:
            return "any"
        kept = {
            field: _CHOICES.get(f"{name.removeprefix(_CORE)}.{field}")
            or _fields(child, definitions, levels - 1)
            for field, child in node["properties"].items()
        }
        return dict(sorted(kept.items()))
    if kind == "array":
        return [_fields(node["items"], definitions, levels)] if levels > 0 else "any"
    return kind


def chart_definition() -> dict[Path, str]:
    """Text of the definition as the chart holds it."""
    return {DEFINITION: to_yaml(run_crd())}


def chart_defaults() -> dict[Path, str]:
    """Text of the chart's values as its templates read them for a release without some of them."""
    values = YAML(typ="safe").load((CHART / "values.yaml").read_text())
    return {CHART / "files" / "defaults.json": json.dumps(values, indent=1) + "\n"}


def rendered_files() -> dict[Path, str]:
    """Text of ``deploy/vcpo.yaml``, objects in the order to make them in."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in _KIND_ORDER}
    for text in (_NAMESPACE, *rendered_documents()):
        by_kind[YAML(typ="safe").load(text)["kind"]].append(_HELM_LABEL.sub("", text))
    del by_kind["CustomResourceDefinition"]
    documents = [text for texts in by_kind.values() for text in texts]
    return {MANIFESTS: _HEADER + "".join(f"---\n{document}\n" for document in documents)}


def dashboards() -> dict[Path, str]:
    """Text of each dashboard's file."""
    return {DASHBOARDS / f"{board.uid}.json": to_grafana(board) for board in BOARDS}


def main() -> int:
    """Write the files, or check them; the exit status is 1 when a committed one has drifted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on drift")
    arguments = parser.parse_args()
    stale = sorted(set(DASHBOARDS.glob("*.json")) - dashboards().keys())
    for path in stale if not arguments.check else ():
        path.unlink()
    # Each renders what the one before wrote.
    for files in (
        *(pod_template_fields, chart_definition, chart_defaults, dashboards),
        rendered_files,
    ):
        drifted = {path: text for path, text in files().items() if not _holds(path, text)}
        stale += drifted
        if not arguments.check:
            for path, text in drifted.items():
                path.write_text(text)
    fix = "is stale. Fix: python -m scripts.render_manifests"
    for path in stale:
        sys.stderr.write(f"{path.relative_to(ROOT)} {fix if arguments.check else 'written'}\n")
    return 1 if stale and arguments.check else 0


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    raise SystemExit(main())
