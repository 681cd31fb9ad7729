"""What differs between two versions that are at hand as files."""

from __future__ import annotations

import uuid

import numpy as np

from vcpo.wire.deltas import element_width
from vcpo.wire.weights import Payload, TensorSection, tensor_sections
from vcpo_learner.changed_elements import Bits, ChangedElements
from vcpo_learner.clock import Clock
from vcpo_learner.weights.deltas import encode_delta
from vcpo_learner.weights.store import PolicyStore, PublishedPolicy
from vcpo_learner.weights.version_folder import VersionFolder


def changes_between(before: Payload, after: Payload) -> dict[str, ChangedElements]:
    """Return the elements of each tensor whose bits differ; both files have the same layout."""
    changes = {}
    for name, section in tensor_sections(after).items():
        was, now = _bits(before, section), _bits(after, section)
        positions = np.flatnonzero(was != now)
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


def store_in_process(incarnation: str, clock: Clock) -> PolicyStore:
    """Return a store whose files are in this process, where workers in it see them."""
    folder = VersionFolder(f"memory://{uuid.uuid4().hex}", incarnation, 0, is_temporary=False)
    return PolicyStore(folder, incarnation=incarnation, clock=clock)


def _bits(payload: Payload, section: TensorSection) -> Bits:
    num_bytes = section.end - section.begin
    width = element_width(num_bytes, section.num_elements)
    return np.frombuffer(
        payload, dtype=f"<u{width}", count=num_bytes // width, offset=section.begin
    )
