"""A version's bytes are used only if every checksum holds; no other error is raised."""

import json
import struct
from itertools import product

import pytest
import xxhash

from vcpo.wire.limits import MAX_SHARDS
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError, manifest_of, shards_of, verify

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


PAYLOAD = payload_of()
DATA_START = len(PAYLOAD) - len(BIAS + WEIGHT)


def manifest() -> policy_pb2.PolicyManifest:
    return manifest_of(PAYLOAD, policy_version=7, incarnation="first")


def flip_bit(payload: bytes, position: int, bit: int = 0) -> bytes:
    return payload[:position] + bytes([payload[position] ^ 1 << bit]) + payload[position + 1 :]


def test_a_manifest_describes_every_tensor():
    assert manifest() == policy_pb2.PolicyManifest(
        policy_version=7,
        incarnation="first",
        total_bytes=len(PAYLOAD),
        tensors=[
            policy_pb2.TensorEntry(
                name="bias", dtype="F32", shape=[2], xxh3=xxhash.xxh3_64_intdigest(BIAS)
            ),
            policy_pb2.TensorEntry(
                name="weight", dtype="F32", shape=[2, 2], xxh3=xxhash.xxh3_64_intdigest(WEIGHT)
            ),
        ],
    )


def test_intact_bytes_are_accepted():
    verify(bytes(PAYLOAD), manifest())


@pytest.mark.parametrize("position", range(len(BIAS + WEIGHT)))
def test_a_flipped_bit_is_blamed_on_its_tensor(position):
    name = "bias" if position < len(BIAS) else "weight"
    with pytest.raises(CorruptWeightsError, match=f"tensor '{name}': differs from the manifest"):
        verify(flip_bit(PAYLOAD, DATA_START + position), manifest())


def test_no_flipped_bit_of_the_header_is_overlooked():
    intact = payload_of({"bias": HEADER["bias"]}, BIAS)
    expected = manifest_of(intact, policy_version=7, incarnation="first")
    for position, bit in product(range(len(intact) - len(BIAS)), range(8)):
        with pytest.raises(CorruptWeightsError):
            verify(flip_bit(intact, position, bit), expected)


@pytest.mark.parametrize("size", [0, 7, 8, DATA_START, len(PAYLOAD) - 1])
def test_a_truncated_payload_is_refused(size):
    with pytest.raises(CorruptWeightsError, match=f"must be {len(PAYLOAD)} bytes, got {size}"):
        verify(PAYLOAD[:size], manifest())


def test_a_tensor_too_many_is_named():
    extra = {**HEADER, "gate": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    received = payload_of(extra)
    expected = manifest()
    expected.total_bytes = len(received)
    with pytest.raises(CorruptWeightsError, match="tensor 'gate': differs"):
        verify(received, expected)


def test_a_tensor_of_another_shape_is_named():
    reshaped = {**HEADER, "weight": {"dtype": "F32", "shape": [4, 1], "data_offsets": [8, 24]}}
    with pytest.raises(CorruptWeightsError, match="tensor 'weight': differs"):
        verify(payload_of(reshaped), manifest())


class TestWhatIsNoSafetensorsFile:
    @pytest.mark.parametrize(
        ("payload", "complaint"),
        [
            (b"", "too short for a safetensors file"),
            (b"\x01\0\0\0\0\0\0", "too short for a safetensors file"),
            (struct.pack("<Q", 3) + b"{}", "header of 3 bytes does not fit"),
            (struct.pack("<Q", 2**64 - 1) + b"{}", "does not fit"),
            (payload_of(b"{"), "header is not JSON"),
            (payload_of(b"\xff\xfe"), "header is not JSON"),
            (payload_of(b"[" * 100_000), "header is not JSON"),
            (payload_of(b"[]"), "header is not a JSON object"),
        ],
        ids=["empty", "cut", "long", "huge", "half", "binary", "deep", "list"],
    )
    def test_it_is_refused_with_the_reason(self, payload, complaint):
        with pytest.raises(CorruptWeightsError, match=complaint):
            manifest_of(payload, policy_version=0, incarnation="a")

    @pytest.mark.parametrize(
        "entry",
        [
            3,
            {"dtype": "F32", "shape": [2]},
            {"shape": [2], "data_offsets": [0, 8]},
            {"dtype": "F32", "data_offsets": [0, 8]},
            {"dtype": 32, "shape": [2], "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": [2**64], "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": [2], "data_offsets": [0]},
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]},
            {"dtype": "F32", "shape": [2], "data_offsets": [0.5, 8]},
        ],
    )
    def test_a_tensor_that_is_not_described_is_named(self, entry):
        with pytest.raises(CorruptWeightsError, match="tensor 'bias': the header does not"):
            manifest_of(payload_of({"bias": entry}), policy_version=0, incarnation="a")

    @pytest.mark.parametrize("offsets", [[-1, 8], [8, 4], [0, 25], [24, 2**70]])
    def test_offsets_outside_the_payload_are_refused(self, offsets):
        header = {"bias": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}
        with pytest.raises(CorruptWeightsError, match=r"tensor 'bias': offsets .* lie outside"):
            manifest_of(payload_of(header), policy_version=0, incarnation="a")

    def test_a_name_that_no_text_can_hold_is_refused(self):
        header = b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
        with pytest.raises(CorruptWeightsError, match="does not describe it"):
            manifest_of(payload_of(header), policy_version=0, incarnation="a")


def in_shards(**changes: object) -> policy_pb2.PolicyManifest:
    """Rows 0 and 1 of `a` in shard 0, row 2 in shard 2; `b` of three rows in shard 1."""
    first, second, third = (
        policy_pb2.PolicyManifest(
            policy_version=7, incarnation="first", shard=number, tensors=[entry]
        )
        for number, entry in enumerate(
            [
                policy_pb2.TensorEntry(name="a", dtype="F32", shape=[2, 5]),
                policy_pb2.TensorEntry(name="b", dtype="BF16", shape=[3]),
                policy_pb2.TensorEntry(name="a", dtype="F32", shape=[1, 5], first_row=2),
            ]
        )
    )
    second.address, third.address = ":7601", "[::1]:7602"
    first.other_shards.extend([second, third])
    for path, value in changes.items():
        *owners, field = path.split("__")
        message = first
        for owner in owners:
            name, _, number = owner.partition("_at_")
            message = getattr(message, name)[int(number)]
        if isinstance(value, list):
            getattr(message, field)[:] = value
        else:
            setattr(message, field, value)
    return first


def test_shards_that_fit_together_are_returned_in_order():
    assert [shard.shard for shard in shards_of(in_shards())] == [0, 1, 2]


def test_a_version_in_one_piece_is_its_only_shard():
    assert shards_of(manifest()) == (manifest(),)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("shard", 1, "shard: must be 0, got 1"),
        ("other_shards_at_1__shard", 1, r"other_shards\[1\]\.shard: must be 2, got 1"),
        ("other_shards_at_0__policy_version", 8, r"other_shards\[0\]\.policy_version: must be 7"),
        ("other_shards_at_0__incarnation", "x", r"other_shards\[0\]\.incarnation: must be 'first'"),
        ("address", "host", "address: must be host:port or :port, got 'host'"),
        ("address", "a b:1", "address: must be"),
        ("address", "http://a:1", "address: must be"),
        ("other_shards_at_0__address", ":0", r"other_shards\[0\]\.address: must be .* got ':0'"),
        ("other_shards_at_0__address", ":65536", r"got ':65536'"),
        ("tensors_at_0__first_row", 1, r"tensors\[0\]\.first_row: must be 0 for 'a', got 1"),
        (
            "other_shards_at_1__tensors_at_0__first_row",
            3,
            r"other_shards\[1\]\.tensors\[0\]\.first_row: must be 2 for 'a', got 3",
        ),
        ("other_shards_at_1__tensors_at_0__first_row", 1, "first_row: must be 2 for 'a', got 1"),
        ("other_shards_at_1__tensors_at_0__name", "c", "first_row: must be 0 for 'c', got 2"),
        (
            "other_shards_at_1__tensors_at_0__dtype",
            "F16",
            "dtype: must be 'F32' for 'a', got 'F16'",
        ),
        (
            "other_shards_at_1__tensors_at_0__shape",
            [1, 4],
            r"shape: must be like \[2, 5\] for 'a', got \[1, 4\]",
        ),
        ("other_shards_at_1__tensors_at_0__shape", [1], "shape: must be like"),
    ],
)
def test_shards_that_do_not_fit_together_are_refused_with_field_and_value(path, value, problem):
    with pytest.raises(CorruptWeightsError, match=f"^manifest: .*{problem}"):
        shards_of(in_shards(**{path: value}))


def test_shards_within_shards_are_refused():
    nested = in_shards()
    nested.other_shards[0].other_shards.add()
    with pytest.raises(
        CorruptWeightsError, match=r"other_shards\[0\]\.other_shards: must be empty"
    ):
        shards_of(nested)


def test_a_number_that_is_in_two_shards_is_refused():
    scalar = policy_pb2.TensorEntry(name="scale", dtype="F32")
    twice = in_shards()
    twice.tensors.append(scalar)
    assert len(shards_of(twice)) == 3
    twice.other_shards[0].tensors.append(scalar)
    with pytest.raises(
        CorruptWeightsError, match=r"shape: must be like \[\] for 'scale', got \[\]"
    ):
        shards_of(twice)


def test_more_shards_than_a_message_can_describe_are_refused():
    many = policy_pb2.PolicyManifest(
        other_shards=[policy_pb2.PolicyManifest(shard=number) for number in range(1, MAX_SHARDS)]
    )
    assert len(shards_of(many)) == 512
    many.other_shards.add(shard=MAX_SHARDS)
    with pytest.raises(CorruptWeightsError, match="other_shards: must be at most 511, got 512"):
        shards_of(many)


def test_the_first_row_is_no_part_of_what_a_file_must_equal():
    shard = manifest()
    shard.tensors[1].first_row = 9
    verify(PAYLOAD, shard)
