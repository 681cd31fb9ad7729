"""Lists in pages: `limit` and `continue`.

Departure: later pages show the present, not the moment of the first page.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from tests.fakes.kubernetes.errors import JsonObject, bad_request, expired
from tests.fakes.kubernetes.store import ObjectKey, identity


def page(
    found: list[JsonObject], query: Mapping[str, str], revision: int, oldest_revision: int
) -> tuple[list[JsonObject], JsonObject]:
    """One page of a list, and the metadata of that page.

    found: all objects, ordered by namespace and name.
    Raises:
        ApiError: 400 when the token cannot be read, 410 when it is from before a compaction.
    """
    if query.get("continue"):
        revision, start = _position(query["continue"])
        if revision < oldest_revision:
            raise expired("The provided continue parameter is too old.")
        found = [body for body in found if identity(body) > start]
    metadata: JsonObject = {"resourceVersion": str(revision)}
    limit = int(query.get("limit") or 0)
    if not limit or len(found) <= limit:
        return found, metadata
    token = _token(identity(found[limit - 1]), revision)
    more = {"continue": token, "remainingItemCount": len(found) - limit}
    return found[:limit], metadata | more


def _token(after: ObjectKey, revision: int) -> str:
    return base64.urlsafe_b64encode(json.dumps([revision, *after]).encode()).decode()


def _position(token: str) -> tuple[int, ObjectKey]:
    try:
        revision, namespace, name = json.loads(base64.urlsafe_b64decode(token))
    except ValueError as mistake:
        raise bad_request(f"continue key is not valid: {mistake}") from mistake
    return revision, (namespace, name)
