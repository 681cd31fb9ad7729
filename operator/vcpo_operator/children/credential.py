"""The Secret with the token that the parts of a run show each other.

Its manifest lacks the token, which nobody who plans may know; it is made up when the Secret is. It
cannot be changed, only deleted: then the operator makes another, and new pods that hold it.
"""

from __future__ import annotations

from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import credential_name


def token_secret(parent: Parent) -> Child | None:
    """Build the Secret; None when the user names one."""
    if parent.run.spec.pods.token_secret_name is not None:
        return None
    body = {"type": "Opaque", "immutable": True}
    return build_child(Kind.SECRET, parent, credential_name(parent.name), body)
