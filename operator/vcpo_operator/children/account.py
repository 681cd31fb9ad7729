"""The ServiceAccount of a run's pods. It has no rights, and pods get no token of it."""

from __future__ import annotations

from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import account_name


def service_account(parent: Parent) -> Child | None:
    """Build the ServiceAccount; None when the user names one."""
    if parent.run.spec.pods.service_account_name is not None:
        return None
    body = {"automountServiceAccountToken": False}
    return build_child(Kind.SERVICE_ACCOUNT, parent, account_name(parent.name), body)
