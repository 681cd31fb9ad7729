"""What a run's Secrets say of how to call its learner. Pure."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vcpo.wire.access.roles import RUN_ROLES, CallerRole, checked_key
from vcpo.wire.access.tls import AUTHORITY_FILE, NOBODY, Trust
from vcpo_operator.names import RunKey, learner_host


class UnusableKeyError(Exception):
    """The Secret with a run's keys holds one that nobody can show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerAccess:
    """How the operator calls the learner of a run."""

    steering_key: str = ""
    """The key that it shows; empty: none is known."""
    trust: Trust | None = None
    """Whom it trusts; None: it calls in plain text."""


def secret_data(body: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the content of a Secret by key; what is no base 64 is left out."""
    data = {}
    for name, encoded in ((body or {}).get("data") or {}).items():
        with contextlib.suppress(ValueError):
            data[name] = base64.b64decode(encoded)
    return data


def steering_key(data: Mapping[str, bytes]) -> str:
    """Return the key for steering; empty if there is none that a header can carry."""
    with contextlib.suppress(ValueError):
        return _checked_key(data.get(CallerRole.STEERING, b""), "")
    return ""


def check_keys(data: Mapping[str, bytes], secret: str) -> None:
    """Check the keys that a Secret holds; a missing one is the pods' to report."""
    for role in RUN_ROLES:
        try:
            _checked_key(data.get(role, b"-"), f"Secret {secret}, key `{role}`")
        except ValueError as error:
            raise UnusableKeyError(str(error)) from error


def learner_trust(key: RunKey, data: Mapping[str, bytes]) -> Trust:
    """Return whom to trust with a key, by the Secret of the certificates.

    Without an authority that is nobody: a key is never sent to a learner in plain text unless the
    run says so.
    """
    authority = data.get(AUTHORITY_FILE)
    if not authority:
        return NOBODY
    return Trust(authority=authority, server_name=learner_host(key))


def _checked_key(content: bytes, source: str) -> str:
    return checked_key(content.decode("ascii", errors="replace"), source)
