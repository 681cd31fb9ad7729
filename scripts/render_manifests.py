"""Render the chart's defaults into ``deploy/vcpo.yaml``; with ``--check`` only compare.

The file is the way to install without Helm: ``kubectl apply --server-side -f deploy/vcpo.yaml``.
It is the chart in the namespace ``vcpo-system``, which it also creates, without what only Helm
understands: its labels, its test pod, and the annotation that keeps the definition on uninstall.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Final

import helm_python
from ruamel.yaml import YAML

ROOT: Final = Path(__file__).resolve().parent.parent
CHART: Final = ROOT / "charts" / "vcpo"
MANIFESTS: Final = ROOT / "deploy" / "vcpo.yaml"

_HEADER = """\
# The VCPO operator with the chart's defaults. Generated: python scripts/render_manifests.py
#   kubectl apply --server-side --force-conflicts -f deploy/vcpo.yaml
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
    "Namespace",
    "CustomResourceDefinition",
    "ServiceAccount",
    "ClusterRole",
    "ClusterRoleBinding",
    "Service",
    "NetworkPolicy",
    "Deployment",
)
_HELM_LABEL = re.compile(r"^ +(helm\.sh/chart: .*|app\.kubernetes\.io/managed-by: Helm)\n", re.M)


def rendered_documents() -> list[str]:
    """The chart's default objects as YAML, one text each, without notes and hooks."""
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render({"crds": {"keep": False}}, name="vcpo", namespace="vcpo-system")
    texts = [text for name, text in sorted(files.items()) if not name.endswith("NOTES.txt")]
    documents = [part.strip() for text in texts for part in re.split(r"^---$", text, flags=re.M)]
    return [document for document in documents if document and "helm.sh/hook:" not in document]


def manifests() -> str:
    """The whole file: namespace first, then what others stand on before what stands on it."""
    documents = [_NAMESPACE, *(_HELM_LABEL.sub("", text) for text in rendered_documents())]
    documents.sort(key=lambda text: _KIND_ORDER.index(YAML(typ="safe").load(text)["kind"]))
    return _HEADER + "".join(f"---\n{document}\n" for document in documents)


def main() -> int:
    """Write the file, or check it; the exit status is 1 when the committed one has drifted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on drift")
    arguments = parser.parse_args()
    text = manifests()
    if not arguments.check:
        MANIFESTS.write_text(text)
        return 0
    if not MANIFESTS.is_file() or MANIFESTS.read_text() != text:
        sys.stderr.write("deploy/vcpo.yaml is stale. Cure: python scripts/render_manifests.py\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
