"""Manifest and verification of a policy version's payload.

A payload is one safetensors file (https://github.com/huggingface/safetensors#format): eight bytes
of header length, a JSON header, the tensors. This module parses only the header, so publishing and
verifying a version needs no tensor library.

If several ranks of the learner hold the model, a version is several payloads, its shards. Each has
rows of the tensors, a manifest and a folder of its own:

```
<store>/<incarnation>/<shard>/00000040.full
                              00000040-00000041.delta
                              00000041-00000042.delta
```
"""

import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import xxhash

from vcpo.wire.limits import MAX_SHARDS
from vcpo.wire.v1 import policy_pb2

PayloadMemory = bytearray | memoryview
"""The bytes of a safetensors file, to be written in place."""
Payload = bytes | PayloadMemory
"""The bytes of a safetensors file."""

_MAX_HEADER_BYTES = 100_000_000
_LENGTH = struct.Struct("<Q")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]*):([0-9]{1,5})")
"""`host:port` or `:port`; brackets hold an IPv6 address."""
_MAX_PORT = 65535

_DTYPE = re.compile(r"BOOL|(F|BF|I|U)(?P<bits>8|16|32|64)(_E[0-9]M[0-9])?")
FILE_PATH = re.compile(
    r"/[0-9A-Za-z_-]{1,64}/[0-9]{1,4}/[0-9]{8,20}(-[0-9]{8,20})?\.(?P<form>full|delta)"
)
"""Path of a version's file below the store's folder, as a server is asked for it."""


class CorruptWeightsError(ValueError):
    """Bytes that differ from the version that the manifest describes; they are never used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSection:
    """Position and description of a tensor in a payload."""

    entry: policy_pb2.TensorEntry
    """Name, dtype and shape, without a checksum."""
    begin: int
    """Index of the first byte in the payload."""
    end: int
    """Index after the last byte."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.entry.shape)


def full_set_name(policy_version: int) -> str:
    """Return the file name of a full set."""
    return f"{policy_version:08d}.full"


def delta_name(delta: policy_pb2.DeltaEntry) -> str:
    """Return the file name of a delta."""
    return f"{delta.base_policy_version:08d}-{delta.policy_version:08d}.delta"


def manifest_of(
    payload: Payload, *, policy_version: int, incarnation: str
) -> policy_pb2.PolicyManifest:
    """Return the manifest of a payload: every tensor with dtype, shape and checksum.

    Raises:
        CorruptWeightsError: if the payload is no safetensors file.
    """
    return policy_pb2.PolicyManifest(
        policy_version=policy_version,
        incarnation=incarnation,
        total_bytes=len(payload),
        tensors=list(_entries(payload)),
    )


def verify(payload: Payload, manifest: policy_pb2.PolicyManifest) -> None:
    """Check a payload against its manifest, tensor by tensor.

    Raises:
        CorruptWeightsError: naming the first tensor that differs.
    """
    verify_tensors(verify_layout(payload, manifest), manifest)


def verify_layout(payload: Payload, manifest: policy_pb2.PolicyManifest) -> dict[str, memoryview]:
    """Check that a payload has a manifest's tensors; return their bytes, by name.

    Raises:
        CorruptWeightsError: naming the first tensor that differs.
    """
    if len(payload) != manifest.total_bytes:
        raise CorruptWeightsError(
            f"payload: must be {manifest.total_bytes} bytes, got {len(payload)}"
        )
    sections, data = tensor_sections(payload), memoryview(payload)
    expected = {each.name: (each.dtype, list(each.shape)) for each in manifest.tensors}
    found = {n: (each.entry.dtype, list(each.entry.shape)) for n, each in sections.items()}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise CorruptWeightsError(f"tensor {name!r}: differs from the manifest")
    return {name: data[each.begin : each.end] for name, each in sections.items()}


def verify_tensors(tensors: Mapping[str, Any], manifest: policy_pb2.PolicyManifest) -> None:
    """Check the bytes of all of a manifest's tensors.

    tensors: by name, anything that has its bytes in a row.

    Raises:
        CorruptWeightsError: naming the first tensor that differs.
    """
    for entry in sorted(manifest.tensors, key=lambda each: each.name):
        if xxhash.xxh3_64_intdigest(tensors[entry.name]) != entry.xxh3:
            raise CorruptWeightsError(f"tensor {entry.name!r}: differs from the manifest")


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element of a safetensors type.

    Raises:
        CorruptWeightsError: if there is no such type.
    """
    found = _DTYPE.fullmatch(dtype)
    if found is None:
        raise CorruptWeightsError(f"dtype: must be a type of safetensors, got {dtype!r:.80}")
    return int(found["bits"] or 8) // 8


def file_header(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> bytes:
    """Return the header of a safetensors file whose tensors follow each other in this order.

    tensors: dtype, shape and number of bytes, by name.
    """
    described, end = {}, 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        begin, end = end, end + num_bytes
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return _LENGTH.pack(len(text)) + text


def shards_of(manifest: policy_pb2.PolicyManifest) -> tuple[policy_pb2.PolicyManifest, ...]:
    """Return the manifests of a version's shards, in the order of their numbers.

    Raises:
        CorruptWeightsError: naming the field and its value, if they do not describe one version:
            the number or the version of a shard is wrong, an address is none, or the rows of a
            tensor do not follow each other without gap.
    """
    shards = (manifest, *manifest.other_shards)
    _require(
        "other_shards", len(shards) - 1, f"at most {MAX_SHARDS - 1}", len(shards) <= MAX_SHARDS
    )
    for number, shard in enumerate(shards):
        path = _path(number)
        _require(f"{path}shard", shard.shard, str(number), shard.shard == number)
        for field in ("policy_version", "incarnation"):
            expected, found = getattr(manifest, field), getattr(shard, field)
            _require(path + field, found, f"{expected!r} as in shard 0", found == expected)
        inner = len(shard.other_shards) if number else 0
        _require(f"{path}other_shards", inner, "empty", inner == 0)
        _require(f"{path}address", shard.address, "host:port or :port", _is_address(shard.address))
    _check_rows(shards)
    return shards


def tensor_sections(payload: Payload) -> dict[str, TensorSection]:
    """Return the section of each tensor of a payload, by name.

    Raises:
        CorruptWeightsError: if the payload is no safetensors file.
    """
    header, data_start = _header(payload)
    return {
        name: _section(name, header[name], data_start, len(payload))
        for name in sorted(header.keys() - {"__metadata__"})
    }


def _entries(payload: Payload) -> Iterator[policy_pb2.TensorEntry]:
    data = memoryview(payload)
    for section in tensor_sections(payload).values():
        section.entry.xxh3 = xxhash.xxh3_64_intdigest(data[section.begin : section.end])
        yield section.entry


def _section(name: str, described: Any, data_start: int, size_bytes: int) -> TensorSection:
    try:
        begin, end = (index(offset) for offset in described["data_offsets"])
        entry = policy_pb2.TensorEntry(
            name=name, dtype=described["dtype"], shape=described["shape"]
        )
    except (KeyError, TypeError, ValueError) as error:
        message = f"tensor {name!r}: the header does not describe it ({error})"
        raise CorruptWeightsError(message) from error
    if not 0 <= begin <= end <= size_bytes - data_start:
        message = f"tensor {name!r}: offsets {begin}..{end} lie outside the payload"
        raise CorruptWeightsError(message)
    return TensorSection(entry=entry, begin=data_start + begin, end=data_start + end)


def _path(shard: int) -> str:
    return f"other_shards[{shard - 1}]." if shard else ""


def _require(field: str, value: object, requirement: str, holds: bool) -> None:
    if not holds:
        raise CorruptWeightsError(f"manifest: {field}: must be {requirement}, got {value!r:.80}")


def _is_address(address: str) -> bool:
    match = _ADDRESS.fullmatch(address)
    return not address or (match is not None and 1 <= int(match[2]) <= _MAX_PORT)


def _check_rows(shards: Sequence[policy_pb2.PolicyManifest]) -> None:
    """Check that the shards' rows of every tensor follow each other without gap, from row 0."""
    parts: defaultdict[str, list[tuple[str, policy_pb2.TensorEntry]]] = defaultdict(list)
    for number, shard in enumerate(shards):
        for position, entry in enumerate(shard.tensors):
            parts[entry.name].append((f"{_path(number)}tensors[{position}].", entry))
    for name, found in parts.items():
        found.sort(key=lambda part: part[1].first_row)
        whole = found[0][1]
        num_rows = 0
        for path, entry in found:
            of = f"for {name!r:.80}"
            dtype, shape, row = entry.dtype, list(entry.shape), entry.first_row
            _require(f"{path}dtype", dtype, f"{whole.dtype!r} {of}", dtype == whole.dtype)
            is_like = shape[1:] == whole.shape[1:] and (bool(shape) or len(found) == 1)
            _require(f"{path}shape", shape, f"like {list(whole.shape)} {of}", is_like)
            _require(f"{path}first_row", row, f"{num_rows} {of}", row == num_rows)
            num_rows += shape[0] if shape else 1


def _header(payload: Payload) -> tuple[dict[str, Any], int]:
    if len(payload) < _LENGTH.size:
        raise CorruptWeightsError("payload: too short for a safetensors file")
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or end > len(payload):
        raise CorruptWeightsError(f"payload: header of {length} bytes does not fit")
    try:
        header = json.loads(bytes(payload[_LENGTH.size : end]))
    except (ValueError, RecursionError) as error:
        raise CorruptWeightsError(f"payload: header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CorruptWeightsError("payload: header is not a JSON object")
    return header, end
