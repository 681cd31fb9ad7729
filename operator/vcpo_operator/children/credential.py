"""The Secrets of a run: the keys of its roles, and its certificates.

Their manifests lack the content: the plan does not know it. The executor makes it when it creates a
Secret. The keys cannot be changed, only deleted. The operator then creates another Secret, and
replaces the pods. Certificates are renewed in their Secret, and pods read them again.
"""

from __future__ import annotations

from vcpo.api.cluster import Transport
from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import certificates_name, credential_name


def keys_secret(parent: Parent) -> Child | None:
    """Build the Secret without its keys; None when the user names one."""
    if parent.run.spec.pods.keys_secret_name is not None:
        return None
    body = {"type": "Opaque", "immutable": True}
    return build_child(Kind.SECRET, parent, credential_name(parent.name), body)


def certificates_secret(parent: Parent) -> Child | None:
    """Build the Secret without its certificates; None for plain text, or if the user names one."""
    pods = parent.run.spec.pods
    if pods.transport is Transport.PLAIN_TEXT or pods.tls_secret_name is not None:
        return None
    body = {"type": "Opaque"}
    return build_child(Kind.SECRET, parent, certificates_name(parent.name), body)
