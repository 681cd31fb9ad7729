"""`python -m vcpo_operator.render FILE`: the objects that a run would get. It needs no cluster.

What only a cluster knows stands as `unknown`: the uids of the run and of its keys.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from vcpo.api import SpecError, VCPORun, load_run, missing_gpus
from vcpo_operator.__main__ import add_pod_options, operator_defaults
from vcpo_operator.children.config import make_parent
from vcpo_operator.children.defaults import OperatorDefaults
from vcpo_operator.children.family import build_children
from vcpo_operator.children.manifest import Child, Manifest, Owner
from vcpo_operator.names import DEFAULTS_KIND, RunKey
from vcpo_operator.observed.records import FieldOrigin
from vcpo_operator.observed.run_defaults import RunDefaults, merge_spec

_UNKNOWN = "unknown"


def render_run(run: VCPORun, defaults: OperatorDefaults) -> tuple[Child, ...]:
    """Return the objects that a run would get.

    Raises: ValueError when a user's template cannot be merged.
    """
    key = RunKey(run.metadata.namespace or "default", run.metadata.name)
    return build_children(make_parent(run, Owner(key=key, uid=_UNKNOWN)), defaults)


def with_defaults(run: VCPORun, files: Sequence[Path]) -> tuple[VCPORun, tuple[FieldOrigin, ...]]:
    """Return a run with the defaults of files, and which fields come from them.

    files: Each with a VCPORunDefaults; the cluster's first.
    Raises: OSError or YAMLError if a file cannot be read, ValueError if it or the result is
        invalid.
    """
    layers = []
    for path in files:
        body = YAML(typ="safe").load(path.read_text())
        if not isinstance(body, Mapping) or body.get("kind") != DEFAULTS_KIND:
            raise ValueError(f"{path}: must be a {DEFAULTS_KIND}")
        layers.append(RunDefaults.of(body, str(path)))
    document = run.model_dump(mode="json", by_alias=True)
    document["spec"], origins = merge_spec(document["spec"], layers)
    return VCPORun.model_validate(document), origins


def main() -> int:
    """Print the objects of a run file as YAML, and what to note on stderr.

    Returns 0, or 2 if the file is invalid.
    """
    parser = argparse.ArgumentParser(prog="vcpo render", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--defaults",
        type=Path,
        action="append",
        default=[],
        help="file with a VCPORunDefaults; the cluster's before the namespace's",
    )
    images = {f"{role}_image": f"vcpo-{role}:{version('vcpo')}" for role in ("learner", "rollout")}
    add_pod_options(parser, images)
    parser.add_argument("--log-format", default="json", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        run, origins = with_defaults(load_run(arguments.file), arguments.defaults)
        children = render_run(run, operator_defaults(arguments))
    except (OSError, SpecError, ValueError, YAMLError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.explicit_start = True
    yaml.dump_all(list(_documents(children)), sys.stdout)
    for each in origins:
        sys.stderr.write(f"note: spec.{each.field}: {each.how} of {each.origin}\n")
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
