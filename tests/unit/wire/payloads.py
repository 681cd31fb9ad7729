"""Safetensors files by hand: the length, the JSON header, the bytes."""

from __future__ import annotations

import json
import struct

BIAS = struct.pack("<2f", 1.0, 2.0)
WEIGHT = struct.pack("<4f", 3.0, 4.0, 5.0, 6.0)
HEADER = {
    "__metadata__": {"format": "pt"},
    "bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]},
}


def payload_of(header: object = HEADER, data: bytes = BIAS + WEIGHT) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
