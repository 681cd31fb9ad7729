"""Targets: messages of workers and of a learner, read by their converters."""

import contextlib
import struct
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st

from tests.fixtures.signals import signals_message
from tests.fuzz.target import Target
from vcpo.learner_control import run_signals
from vcpo.wire.deltas import chain_to
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.failures import failure_from_message, failure_to_message
from vcpo.wire.trajectory import (
    partial_from_message,
    partial_to_message,
    trajectory_from_message,
    trajectory_to_message,
)
from vcpo.wire.v1 import control_pb2, ledger_pb2, policy_pb2, work_pb2
from vcpo.wire.weights import CorruptWeightsError, shards_of
from vcpo_learner.ledger.lease import lease_from_message, lease_to_message

_LOGPROBS = st.lists(st.floats(width=32), max_size=6).map(
    lambda numbers: struct.pack(f"<{len(numbers)}f", *numbers)
)
_TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=6).map(
    lambda numbers: struct.pack(f"<{len(numbers)}I", *numbers)
)
_VALUES: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 6) | st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 6) | st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-1, 12),
}


@st.composite
def _messages(draw: st.DrawFn, like: Message) -> Message:
    """A message in which up to three fields are not those of `like`."""
    message = type(like)()
    message.CopyFrom(like)
    fields = [one for one in like.DESCRIPTOR.fields if not _is_map(one)]
    for field in draw(st.lists(st.sampled_from(fields), max_size=3)):
        message.ClearField(field.name)
        values = draw(st.lists(_values(message, field), max_size=3 if field.is_repeated else 1))
        for value in values:
            if field.is_repeated:
                getattr(message, field.name).append(value)
            elif isinstance(value, Message):
                getattr(message, field.name).CopyFrom(value)
            else:
                setattr(message, field.name, value)
    return message


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _values(message: Message, field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=9) | _TOKEN_IDS | _LOGPROBS
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return st.text(max_size=5) | st.just("x" * 300)
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        nested = type(message)()
        part = getattr(nested, field.name)
        return _messages(part.add() if field.is_repeated else part)
    return _VALUES[field.cpp_type]


def _reads(
    like: Message, round_trip: Callable[[Any], None], *refusals: type[Exception]
) -> Callable[[bytes], None]:
    """A check: bytes are a message or none, and the message is refused or read soundly."""

    def check(data: bytes) -> None:
        try:
            message = type(like).FromString(data)
        except DecodeError:
            return
        with contextlib.suppress(*refusals):
            round_trip(message)

    return check


def _read_trajectory(message: work_pb2.Trajectory) -> None:
    read = trajectory_from_message(message, path="t")
    assert trajectory_from_message(trajectory_to_message(read), path="t") == read
    assert sum(read.sampled_mask) == read.num_sampled_tokens
    assert sum(num_tokens for _, num_tokens in read.lags(0)) == read.num_sampled_tokens >= 1
    if read.expert_routes is not None:
        num_tokens = len(read.prompt_token_ids) + len(read.response_token_ids)
        assert 1 <= read.expert_routes.num_tokens <= num_tokens


def _read_partial(message: work_pb2.PartialResponse) -> None:
    read = partial_from_message(message, path="p")
    assert partial_from_message(partial_to_message(read), path="p") == read
    assert sum(read.sampled_mask) == read.num_sampled_tokens >= 1


def _read_failure(message: work_pb2.Failure) -> None:
    read = failure_from_message(message)
    assert failure_from_message(failure_to_message(read)) == read
    assert "\n" not in read.sentence


def _read_lease(message: ledger_pb2.HeldLease) -> None:
    read = lease_from_message(message, path="lease")
    again = lease_from_message(lease_to_message(read), path="lease")
    assert asdict(again) == asdict(read)


def _read_signals(message: control_pb2.Signals) -> None:
    run_signals(message)


def _read_manifest(message: policy_pb2.PolicyManifest) -> None:
    for held in (None, 3):
        is_whole, deltas = chain_to(message, held)
        ends = [message.full_set_version if is_whole else 3, *(d.policy_version for d in deltas)]
        assert [delta.base_policy_version for delta in deltas] == ends[:-1]
        assert ends[-1] == message.policy_version


def _read_shards(message: policy_pb2.PolicyManifest) -> None:
    """The shards hold each row of each tensor once."""
    rows: dict[str, list[int]] = {}
    for shard in shards_of(message):
        for entry in shard.tensors:
            num_rows = entry.shape[0] if entry.shape else 1
            rows.setdefault(entry.name, []).extend((entry.first_row, entry.first_row + num_rows))
    for name, ends in rows.items():
        ends.sort()
        assert ends[0] == 0, name
        assert ends[1:-1:2] == ends[2::2], name


_TRAJECTORY = work_pb2.Trajectory(
    trajectory_id="lease/0",
    prompt_token_ids=struct.pack("<2I", 5, 6),
    response_token_ids=struct.pack("<4I", 1, 2, 3, 4),
    rollout_logprobs=struct.pack("<3f", -0.5, -1.0, 0.0),
    version_spans=[work_pb2.VersionSpan(policy_version=4, num_tokens=3)],
    reward=0.25,
    finish_reason=work_pb2.FINISH_REASON_STOP,
    inserted_spans=[work_pb2.TokenSpan(start=1, num_tokens=1)],
    expert_routes=work_pb2.ExpertRoutes(experts=bytes(8), num_layers=2, num_choices=2),
)
_PARTIAL = work_pb2.PartialResponse(
    token_ids=struct.pack("<2I", 1, 2),
    logprobs=struct.pack("<2f", -0.5, -1.0),
    version_spans=[work_pb2.VersionSpan(policy_version=4, num_tokens=2)],
)
_MANIFEST = policy_pb2.PolicyManifest(
    policy_version=5,
    full_set_version=3,
    deltas=[
        policy_pb2.DeltaEntry(base_policy_version=3, policy_version=4),
        policy_pb2.DeltaEntry(base_policy_version=4, policy_version=5),
    ],
)
_SHARDS = policy_pb2.PolicyManifest(
    policy_version=5,
    tensors=[policy_pb2.TensorEntry(name="a", dtype="F32", shape=[2, 3])],
    other_shards=[
        policy_pb2.PolicyManifest(
            policy_version=5,
            shard=1,
            address=":7601",
            tensors=[policy_pb2.TensorEntry(name="a", dtype="F32", shape=[4, 3], first_row=2)],
        )
    ],
)
_SIGNALS = signals_message(step=3)


def _target(
    name: str, like: Message, read: Callable[[Any], None], *refusals: type[Exception]
) -> Target:
    inputs = _messages(like).map(lambda message: bytes(message.SerializeToString()))
    return Target(name=name, inputs=inputs, check=_reads(like, read, *refusals))


TARGETS = (
    _target("trajectory", _TRAJECTORY, _read_trajectory, InvalidMessageError),
    _target("partial_response", _PARTIAL, _read_partial, InvalidMessageError),
    _target("failure", work_pb2.Failure(message="m"), _read_failure),
    _target(
        "held_lease",
        ledger_pb2.HeldLease(lease_id="lease", accepted=[_TRAJECTORY]),
        _read_lease,
        InvalidMessageError,
    ),
    _target("signals", _SIGNALS, _read_signals, ValueError),
    _target("delta_chain", _MANIFEST, _read_manifest, CorruptWeightsError),
    _target("shards", _SHARDS, _read_shards, CorruptWeightsError),
)
