"""`python -m vcpo_operator.render FILE`: the objects that a run would get. It needs no cluster.

What only a cluster knows stands as `unknown`: the uids of the run and of its keys.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from ruamel.yaml import YAML

from vcpo.api import SpecError, VCPORun, load_run, missing_gpus
from vcpo_operator.__main__ import add_pod_options, operator_defaults
from vcpo_operator.children.config import make_parent
from vcpo_operator.children.defaults import OperatorDefaults
from vcpo_operator.children.family import build_children
from vcpo_operator.children.manifest import Child, Manifest, Owner
from vcpo_operator.names import RunKey

_UNKNOWN = "unknown"


def render_run(run: VCPORun, defaults: OperatorDefaults) -> tuple[Child, ...]:
    """Return the objects that a run would get.

    Raises: ValueError when a user's template cannot be merged.
    """
    key = RunKey(run.metadata.namespace or "default", run.metadata.name)
    return build_children(make_parent(run, Owner(key=key, uid=_UNKNOWN)), defaults)


def main() -> int:
    """Print the objects of a run file as YAML, and what to note on stderr.

    Returns 0, or 2 if the file is invalid.
    """
    parser = argparse.ArgumentParser(prog="vcpo render", description=__doc__)
    parser.add_argument("file", type=Path)
    images = {f"{role}_image": f"vcpo-{role}:{version('vcpo')}" for role in ("learner", "rollout")}
    add_pod_options(parser, images)
    parser.add_argument("--log-format", default="json", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        run = load_run(arguments.file)
        children = render_run(run, operator_defaults(arguments))
    except (SpecError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.explicit_start = True
    yaml.dump_all(list(_documents(children)), sys.stdout)
    for note in missing_gpus(run.spec):
        sys.stderr.write(f"warning: {note}\n")
    return 0


def _documents(children: tuple[Child, ...]) -> Iterator[Manifest]:
    """Yield the manifests without digest and owner, which are not of the file."""
    for child in children:
        left_out = ("annotations", "ownerReferences")
        metadata = {k: v for k, v in child.manifest["metadata"].items() if k not in left_out}
        yield {**child.manifest, "metadata": metadata}


if __name__ == "__main__":
    raise SystemExit(main())
