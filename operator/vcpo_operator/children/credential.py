"""The Secret with the token that a run's processes send each other.

The manifest lacks the token: the plan does not know it. The executor generates a token when it
creates the Secret. The Secret cannot be changed, only deleted. The operator then creates another
Secret, and replaces the pods.
"""

from __future__ import annotations

from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import credential_name


def token_secret(parent: Parent) -> Child | None:
    """Build the Secret without its token; None when the user names one."""
    if parent.run.spec.pods.token_secret_name is not None:
        return None
    body = {"type": "Opaque", "immutable": True}
    return build_child(Kind.SECRET, parent, credential_name(parent.name), body)
