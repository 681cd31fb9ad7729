"""The Secret with the keys of a run's roles: worker, steering and peer.

The manifest lacks the keys: the plan does not know them. The executor makes them when it creates
the Secret. The Secret cannot be changed, only deleted. The operator then creates another Secret,
and replaces the pods.
"""

from __future__ import annotations

from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import credential_name


def keys_secret(parent: Parent) -> Child | None:
    """Build the Secret without its keys; None when the user names one."""
    if parent.run.spec.pods.keys_secret_name is not None:
        return None
    body = {"type": "Opaque", "immutable": True}
    return build_child(Kind.SECRET, parent, credential_name(parent.name), body)
