"""Policy versions as bytes: the manifest of a safetensors payload, and its verification.

A payload is one safetensors file (https://github.com/huggingface/safetensors#format): eight bytes
of header length, a JSON header, the tensors. Only the header is parsed here, so neither side needs
a tensor library to publish, relay or verify a version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from operator import index
from typing import Any

import xxhash

from vcpo.wire.v1 import policy_pb2

_MAX_HEADER_BYTES = 100_000_000
_LENGTH = struct.Struct("<Q")


class CorruptWeightsError(ValueError):
    """Bytes that are not the version they claim to be; they are never used."""


def manifest_of(
    payload: bytes, *, policy_version: int, incarnation: str
) -> policy_pb2.PolicyManifest:
    """Describe a payload: every tensor with its type, shape and checksum.

    Raises:
        CorruptWeightsError: when the payload is no safetensors file.
    """
    return policy_pb2.PolicyManifest(
        policy_version=policy_version,
        incarnation=incarnation,
        total_bytes=len(payload),
        tensors=list(_entries(payload)),
    )


def verify(payload: bytes, manifest: policy_pb2.PolicyManifest) -> None:
    """Check that a payload is what the manifest says, tensor by tensor.

    Raises:
        CorruptWeightsError: naming the tensor that differs.
    """
    if len(payload) != manifest.total_bytes:
        raise CorruptWeightsError(
            f"payload: must be {manifest.total_bytes} bytes, got {len(payload)}"
        )
    received = {entry.name: entry for entry in _entries(payload)}
    expected = {entry.name: entry for entry in manifest.tensors}
    for name in sorted(received.keys() | expected.keys()):
        if received.get(name) != expected.get(name):
            raise CorruptWeightsError(f"tensor {name!r}: differs from the manifest")


def _entries(payload: bytes) -> Iterator[policy_pb2.TensorEntry]:
    header, data_start = _header(payload)
    data = memoryview(payload)[data_start:]
    for name in sorted(header.keys() - {"__metadata__"}):
        yield _entry(name, header[name], data)


def _entry(name: str, described: Any, data: memoryview) -> policy_pb2.TensorEntry:
    try:
        begin, end = (index(offset) for offset in described["data_offsets"])
        entry = policy_pb2.TensorEntry(
            name=name, dtype=described["dtype"], shape=described["shape"]
        )
    except (KeyError, TypeError, ValueError) as error:
        message = f"tensor {name!r}: the header does not describe it ({error})"
        raise CorruptWeightsError(message) from error
    if not 0 <= begin <= end <= len(data):
        message = f"tensor {name!r}: offsets {begin}..{end} lie outside the payload"
        raise CorruptWeightsError(message)
    entry.xxh3 = xxhash.xxh3_64_intdigest(data[begin:end])
    return entry


def _header(payload: bytes) -> tuple[dict[str, Any], int]:
    if len(payload) < _LENGTH.size:
        raise CorruptWeightsError("payload: too short for a safetensors file")
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or end > len(payload):
        raise CorruptWeightsError(f"payload: header of {length} bytes does not fit")
    try:
        header = json.loads(payload[_LENGTH.size : end])
    except (ValueError, RecursionError) as error:
        raise CorruptWeightsError(f"payload: header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CorruptWeightsError("payload: header is not a JSON object")
    return header, end
