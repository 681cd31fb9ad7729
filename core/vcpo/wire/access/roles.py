"""The roles of callers, the methods that each may call, and the keys by which a server knows them.

```
role       methods                              key held by
worker     WorkService, PolicyService           learner, workers
           files of the server of weights
steering   ControlService                       learner, operator or local host
```
A key opens its own row and nothing else. The keys belong to one run.
"""

import hmac
import os
import secrets
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from google.protobuf.descriptor import FileDescriptor

from vcpo.wire.v1 import control_pb2, policy_pb2, work_pb2

AUTHORIZATION: Final = "authorization"
"""Metadata key under which a caller shows its role's key."""

_KEY_BYTES = 32


class CallerRole(StrEnum):
    """What a caller is to a server."""

    WORKER = "worker"
    STEERING = "steering"

    @property
    def variable(self) -> str:
        return f"VCPO_{self.name}_KEY"


RUN_ROLES: Final = (CallerRole.WORKER, CallerRole.STEERING)
"""Roles whose keys are made for each run."""

LEARNER_ROLES: Final = (CallerRole.WORKER, CallerRole.STEERING)
"""Roles that call a learner, and so the keys that it holds."""
WORKER_ROLES: Final = (CallerRole.WORKER,)
"""Roles of a worker, and so the keys that it holds."""

RoleKeys = Mapping[CallerRole, str]


def _methods(file: FileDescriptor, service: str) -> frozenset[str]:
    described = file.services_by_name[service]
    return frozenset(f"/{described.full_name}/{method.name}" for method in described.methods)


METHODS_OF: Final[Mapping[CallerRole, frozenset[str]]] = {
    CallerRole.WORKER: (
        _methods(work_pb2.DESCRIPTOR, "WorkService")
        | _methods(policy_pb2.DESCRIPTOR, "PolicyService")
    ),
    CallerRole.STEERING: _methods(control_pb2.DESCRIPTOR, "ControlService"),
}
"""Paths of the methods that a role may call."""


def new_key() -> str:
    """Return a new random key of 256 bits."""
    return secrets.token_urlsafe(_KEY_BYTES)


def new_run_keys() -> RoleKeys:
    """Return new keys for one run."""
    return {role: new_key() for role in RUN_ROLES}


def keys_from_environment(roles: Iterable[CallerRole]) -> RoleKeys:
    """Return the keys of these roles that the environment holds."""
    given = {role: os.environ.get(role.variable) for role in roles}
    return {role: checked_key(key, role.variable) for role, key in given.items() if key}


def checked_key(key: str, source: str) -> str:
    """Return a key without the white space around it, such as the newline at a file's end.

    source: what holds the key, for the error; the key itself is not in it.
    """
    stripped = key.strip()
    if not (stripped and stripped.isascii() and stripped.isprintable()):
        raise ValueError(
            f"{source}: must be printable ASCII characters on one line; write a random text there,"
            " such as that of `openssl rand -hex 32`"
        )
    return stripped


def key_variables(keys: RoleKeys, roles: Iterable[CallerRole]) -> dict[str, str]:
    """Return the environment of a process that holds these roles' keys and none of the run's else.

    The variables of the other roles are empty, whatever the parent's environment holds.
    """
    held = set(roles)
    return {role.variable: keys[role] if role in held else "" for role in RUN_ROLES}


def role_of(authorization: str, keys: RoleKeys) -> CallerRole | None:
    """Return the role whose key a caller shows; None if it shows none of them.

    authorization: the call's metadata, `Bearer <key>`.
    """
    shown = authorization.encode()
    # Every key is compared, in constant time each: the time tells nothing about any of them.
    matching = [role for role, key in keys.items() if hmac.compare_digest(shown, _bearer(key))]
    return matching[0] if matching else None


def authorization(key: str) -> tuple[str, str]:
    """Return the metadata by which a caller shows a role's key."""
    return AUTHORIZATION, _bearer(key).decode()


def _bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()
