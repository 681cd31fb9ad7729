"""What differs between two versions that are at hand as files."""

from __future__ import annotations

import numpy as np

from vcpo.wire.deltas import ChangedElements, elements_of, encode_delta
from vcpo.wire.weights import Payload, tensor_sections
from vcpo_learner.weights.store import PolicyStore, PublishedPolicy


def changes_between(before: Payload, after: Payload) -> dict[str, ChangedElements]:
    """Return the elements of each tensor whose bits differ; both files have the same layout."""
    was, changes = elements_of(before), {}
    for name, now in elements_of(after).items():
        positions = np.flatnonzero(was[name] != now)
        changes[name] = ChangedElements(positions=positions, bits=now[positions])
    return changes


def delta_between(before: Payload, after: Payload) -> bytes:
    """Return the delta from one file to the other."""
    return encode_delta(changes_between(before, after))


def prepare(store: PolicyStore, policy_version: int, payload: bytes) -> PublishedPolicy:
    """Prepare a file as the next version: as a delta, unless that takes as much room."""
    before = store.content
    if len(before) == len(payload) and tensor_sections(before) == tensor_sections(payload):
        changes = changes_between(before, payload)
        if len(encode_delta(changes)) < len(payload):
            return store.prepare(policy_version, changes)
    return store.prepare(policy_version, bytearray(payload))
