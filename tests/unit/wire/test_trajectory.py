"""Trajectories survive the wire, and a malformed one is refused by the name of its field."""

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.limits import MAX_TOKENS
from vcpo.wire.packing import ExpertRoutes
from vcpo.wire.trajectory import (
    FinishReason,
    PartialResponse,
    TokenSpan,
    Trajectory,
    VersionSpan,
    partial_from_message,
    partial_to_message,
    prompt_checksum,
    trajectory_from_message,
    trajectory_to_message,
)
from vcpo.wire.v1 import work_pb2

TOKENS = st.integers(0, 2**32 - 1)
FLOAT32_LOGPROBS = st.floats(-100.0, 0.0, width=32)


def as_float32(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def float32s(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


ROUTES = [
    ExpertRoutes(experts=bytes(range(12)), num_layers=3, num_choices=2),
    ExpertRoutes(experts=bytes(range(4)), num_layers=1, num_choices=2, is_wide=True),
]
"""Of two tokens and of one."""

IDS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=256)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    spans = draw(st.lists(st.tuples(st.integers(0, 2**63), st.integers(1, 5)), min_size=1))
    size = sum(num_tokens for _, num_tokens in spans)
    inserted, end = [], 0
    for gap, num_tokens in draw(st.lists(st.tuples(st.integers(0, size), st.integers(1, 5)))):
        if sum(span.num_tokens for span in inserted) + size >= (start := end + gap):
            inserted.append(TokenSpan(start=start, num_tokens=num_tokens))
            end = start + num_tokens
    length = size + sum(span.num_tokens for span in inserted)
    return Trajectory(
        trajectory_id=draw(IDS),
        prompt_token_ids=tuple(draw(st.lists(TOKENS, min_size=1, max_size=9))),
        response_token_ids=tuple(draw(st.lists(TOKENS, min_size=length, max_size=length))),
        rollout_logprobs=tuple(draw(st.lists(FLOAT32_LOGPROBS, min_size=size, max_size=size))),
        version_spans=tuple(
            VersionSpan(
                policy_version=v, num_tokens=n, key_age_versions=draw(st.integers(0, min(v, 3)))
            )
            for v, n in spans
        ),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        inserted_spans=tuple(inserted),
        expert_routes=draw(st.none() | st.sampled_from(ROUTES)),
        reward_parts=draw(
            st.dictionaries(IDS, st.floats(allow_nan=False, allow_infinity=False), max_size=16)
        ),
        question=draw(st.text(max_size=500)),
        answer=draw(st.text(max_size=500)),
        worker_id=draw(st.none() | st.text(max_size=256)),
    )


def message() -> work_pb2.Trajectory:
    """Three tokens by two versions."""
    return work_pb2.Trajectory(
        trajectory_id="lease/0",
        prompt_token_ids=struct.pack("<2I", 5, 6),
        response_token_ids=struct.pack("<3I", 1, 2, 3),
        rollout_logprobs=float32s(-0.5, -1.0, 0.0),
        version_spans=[
            work_pb2.VersionSpan(policy_version=4, num_tokens=2),
            work_pb2.VersionSpan(policy_version=5, num_tokens=1),
        ],
        reward=0.25,
        finish_reason=work_pb2.FINISH_REASON_STOP,
    )


def refusal_of(change: Callable[[work_pb2.Trajectory], object]) -> str:
    """What is said about the message after a change."""
    changed = message()
    change(changed)
    with pytest.raises(InvalidMessageError) as error:
        trajectory_from_message(changed, path="trajectories[3]")
    assert str(error.value).startswith(f"{error.value.field}: must be ")
    return str(error.value)


@given(trajectories())
def test_a_trajectory_survives_the_wire(trajectory):
    sent = trajectory_to_message(trajectory).SerializeToString()
    received = work_pb2.Trajectory.FromString(sent)
    assert trajectory_from_message(received, path="t") == trajectory


@given(st.floats(-100.0, 0.0))
def test_logprobs_are_rounded_to_float32(logprob):
    one = replace(
        trajectory_from_message(message(), path="t"), rollout_logprobs=(logprob, 0.0, 0.0)
    )
    read = trajectory_from_message(trajectory_to_message(one), path="t")
    assert read.rollout_logprobs == (as_float32(logprob), 0.0, 0.0)


def test_a_message_is_read_field_by_field():
    read = trajectory_from_message(message(), path="t")
    assert read == Trajectory(
        trajectory_id="lease/0",
        prompt_token_ids=(5, 6),
        response_token_ids=(1, 2, 3),
        rollout_logprobs=(-0.5, -1.0, 0.0),
        version_spans=(
            VersionSpan(policy_version=4, num_tokens=2),
            VersionSpan(policy_version=5, num_tokens=1),
        ),
        reward=0.25,
        finish_reason=FinishReason.STOP,
        worker_id=None,
    )


def test_the_oldest_version_counts_wherever_it_sampled():
    one = message()
    one.version_spans[0].policy_version = 9
    assert trajectory_from_message(one, path="t").oldest_policy_version == 5


def test_lags_are_counted_in_tokens():
    read = trajectory_from_message(message(), path="t")
    assert list(read.lags(7)) == [(3, 2), (2, 1)]


def with_tool_output() -> work_pb2.Trajectory:
    """The same three sampled tokens; the tool wrote two behind the second."""
    one = message()
    one.response_token_ids = struct.pack("<5I", 1, 2, 8, 9, 3)
    one.inserted_spans.add(start=2, num_tokens=2)
    return one


def test_what_the_environment_wrote_is_marked_and_not_counted():
    read = trajectory_from_message(with_tool_output(), path="t")
    assert read.response_token_ids == (1, 2, 8, 9, 3)
    assert read.sampled_mask == [True, True, False, False, True]
    assert read.num_sampled_tokens == 3
    assert list(read.lags(7)) == [(3, 2), (2, 1)]


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        (
            [(2, 2), (3, 1)],
            "[1]: must be at least 1 token from 4 on, within the response (5), got ",
        ),
        ([(4, 2)], "[0]: must be at least 1 token from 0 on, within the response (5), got '2 tok"),
        ([(2, 0)], "[0]: must be at least 1 token from 0 on, within the response (5), got '0 tok"),
        ([(0, 5)], ": must be less than the response, got 'the whole response'"),
    ],
)
def test_spans_of_inserted_tokens_must_fit_the_response(spans, said):
    one = with_tool_output()
    one.ClearField("inserted_spans")
    for start, num_tokens in spans:
        one.inserted_spans.add(start=start, num_tokens=num_tokens)
    with pytest.raises(InvalidMessageError) as error:
        trajectory_from_message(one, path="t")
    assert str(error.value).startswith(f"t.inserted_spans{said}")


def test_log_probabilities_are_wanted_of_sampled_tokens_only():
    one = with_tool_output()
    one.rollout_logprobs += float32s(-1.0, -1.0)
    with pytest.raises(InvalidMessageError, match=r"one per token \(3\), got '5 values"):
        trajectory_from_message(one, path="t")


def test_a_logprob_that_rounding_lifted_above_zero_is_accepted():
    one = message()
    one.rollout_logprobs = float32s(1e-4, -1.0, -2.0)
    assert trajectory_from_message(one, path="t").rollout_logprobs[0] == as_float32(1e-4)


@pytest.mark.parametrize(
    "logprob", [float("nan"), float("-inf"), float("inf"), 0.01, -100.25, -1e4, -3e38]
)
def test_a_logprob_that_no_sampled_token_has_is_named(logprob):
    logprobs = float32s(-0.5, logprob, -1.0)
    said = refusal_of(lambda one: setattr(one, "rollout_logprobs", logprobs))
    assert said == (
        "trajectories[3].rollout_logprobs[1]: must be from -100 to 0 nats, got "
        f"{as_float32(logprob)}"
    )


def test_the_lowest_logprob_of_a_sampled_token_is_accepted():
    one = message()
    one.rollout_logprobs = float32s(-100.0, -1.0, -2.0)
    assert trajectory_from_message(one, path="t").rollout_logprobs[0] == -100.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda one: one.ClearField("trajectory_id"),
            "trajectory_id: must be 1 to 256 printable characters, got ''",
        ),
        (
            lambda one: one.ClearField("prompt_token_ids"),
            f"prompt_token_ids: must be 1 to {MAX_TOKENS} tokens, got '0 tokens'",
        ),
        (
            lambda one: one.ClearField("response_token_ids"),
            f"response_token_ids: must be 1 to {MAX_TOKENS} tokens, got '0 tokens'",
        ),
        (
            lambda one: setattr(one, "rollout_logprobs", float32s(-1.0, -1.0, -1.0, -1.0)),
            "rollout_logprobs: must be one per token (3), got '4 values'",
        ),
        (
            lambda one: setattr(one, "response_token_ids", b"12345"),
            "response_token_ids: must be a multiple of 4 bytes, got '5 bytes'",
        ),
        (
            lambda one: one.ClearField("version_spans"),
            "version_spans: must be spans over all sampled tokens (3), got 'spans over 0 tokens'",
        ),
        (
            lambda one: one.version_spans.add(policy_version=6, num_tokens=1),
            "version_spans: must be spans over all sampled tokens (3), got 'spans over 4 tokens'",
        ),
        (
            lambda one: one.version_spans.add(policy_version=6, num_tokens=0),
            "version_spans: must be spans of at least 1 token, got 'an empty span'",
        ),
        (
            lambda one: setattr(one.version_spans[0], "key_age_versions", 5),
            "version_spans.key_age_versions: must be at most the span's version (4), got 5",
        ),
        (
            lambda one: setattr(one, "reward", float("nan")),
            "reward: must be a finite number, got nan",
        ),
        (
            lambda one: setattr(one, "reward", float("-inf")),
            "reward: must be a finite number, got -inf",
        ),
        (
            lambda one: one.reward_parts.update(right=float("nan")),
            "reward_parts.right: must be a finite number, got nan",
        ),
        (
            lambda one: one.reward_parts.update({"": 1.0}),
            "reward_parts: must be 1 to 256 printable characters, got ''",
        ),
        (
            lambda one: one.reward_parts.update({str(each): 1.0 for each in range(17)}),
            "reward_parts: must be at most 16, got '17 parts'",
        ),
        (
            lambda one: setattr(one, "answer", 501 * "4"),
            "answer: must be at most 500 characters, got '501 characters'",
        ),
        (
            lambda one: setattr(one, "finish_reason", 99),
            "finish_reason: must be STOP or LENGTH, got 99",
        ),
    ],
)
def test_a_malformed_field_is_named_with_the_cure(change, said):
    assert refusal_of(change) == f"trajectories[3].{said}"


def with_routes(experts, num_layers=2, num_choices=1, *, is_wide=False):
    routes = work_pb2.ExpertRoutes(
        experts=experts, num_layers=num_layers, num_choices=num_choices, is_wide=is_wide
    )
    return lambda one: one.expert_routes.CopyFrom(routes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_routes(b"12", num_layers=0), "num_layers: must be at least 1, got 0"),
        (with_routes(b"12", num_choices=0), "num_choices: must be at least 1, got 0"),
        (with_routes(b""), "experts: must be a multiple of 2 bytes (a token's), at most 10"),
        (with_routes(b"123"), "experts: must be a multiple of 2 bytes (a token's), at most 10"),
        (with_routes(bytes(12)), "experts: must be a multiple of 2 bytes (a token's), at most 10"),
        (with_routes(b"12", is_wide=True), "experts: must be a multiple of 4 bytes (a token's)"),
    ],
    ids=["no layers", "no choices", "no token", "half a token", "six of five tokens", "half"],
)
def test_routes_must_fit_prompt_and_response(change, said):
    assert refusal_of(change).startswith(f"trajectories[3].expert_routes.{said}")


def test_routes_of_fewer_tokens_than_there_are_and_of_all_are_read():
    for num_tokens in (1, 5):
        changed = message()
        with_routes(bytes(2 * num_tokens))(changed)
        read = trajectory_from_message(changed, path="t").expert_routes
        assert read is not None
        assert read.num_tokens == num_tokens


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_number_that_is_no_experts_is_found(is_wide):
    numbers = struct.pack("<4H" if is_wide else "<4B", 0, 7, 3, 200)
    routes = ExpertRoutes(experts=numbers, num_layers=2, num_choices=1, is_wide=is_wide)
    assert routes.first_beyond(201) is None
    assert routes.first_beyond(200) == 200
    assert routes.first_beyond(5) == 7


def test_an_endless_id_is_refused_and_shortened():
    said = refusal_of(lambda one: setattr(one, "trajectory_id", "x" * 257))
    assert said == (
        f"trajectories[3].trajectory_id: must be 1 to 256 printable characters, got '{'x' * 79}"
    )


def test_a_response_beyond_the_limit_is_refused():
    token_ids = bytes(4 * (MAX_TOKENS + 1))
    said = refusal_of(lambda one: setattr(one, "response_token_ids", token_ids))
    assert said.endswith(f"got '{MAX_TOKENS + 1} tokens'")


@given(st.lists(TOKENS, max_size=9), st.lists(TOKENS, max_size=9))
def test_prompts_have_different_sums_and_none_is_0(first, second):
    assert (prompt_checksum(first) == prompt_checksum(second)) == (first == second)
    assert prompt_checksum(first) != 0


@given(trajectories(), st.sampled_from([None, *FinishReason]))
def test_a_response_under_way_survives_the_wire(trajectory, finish_reason):
    # The first token of a response is always the model's.
    token_ids = (7, *trajectory.response_token_ids)
    partial = PartialResponse(
        token_ids=token_ids,
        logprobs=(-0.5, *trajectory.rollout_logprobs),
        version_spans=(VersionSpan(policy_version=0, num_tokens=1), *trajectory.version_spans),
        finish_reason=finish_reason,
        inserted_spans=tuple(
            replace(span, start=span.start + 1) for span in trajectory.inserted_spans
        ),
        prompt_xxh3=prompt_checksum(trajectory.prompt_token_ids),
    )
    sent = partial_to_message(partial).SerializeToString()
    received = work_pb2.PartialResponse.FromString(sent)
    assert partial_from_message(received, path="begun[0]") == partial


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"token_ids": b""}, "begun[2].token_ids: must be 1 to"),
        ({"logprobs": float32s(-0.5)}, "begun[2].logprobs: must be one per token (2)"),
        ({"logprobs": float32s(-0.5, float("nan"))}, "begun[2].logprobs[1]: must be from -100"),
        ({"logprobs": float32s(-0.5, -101.0)}, "begun[2].logprobs[1]: must be from -100"),
        ({"version_spans": []}, "begun[2].version_spans: must be spans over"),
        ({"finish_reason": 9}, "begun[2].finish_reason: must be UNSPECIFIED, STOP or LENGTH"),
        (
            {"inserted_spans": [work_pb2.TokenSpan(start=0, num_tokens=1)]},
            "begun[2].inserted_spans[0]: must be at least 1 token from 1 on, within the resp",
        ),
        (
            {"inserted_spans": [work_pb2.TokenSpan(start=1, num_tokens=1)]},
            "begun[2].logprobs: must be one per token (1), got '2 values'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_malformed_response_under_way_names_the_field(change, problem):
    fields = {
        "token_ids": struct.pack("<2I", 1, 2),
        "logprobs": float32s(-0.5, -1.0),
        "version_spans": [work_pb2.VersionSpan(policy_version=4, num_tokens=2)],
    }
    malformed = work_pb2.PartialResponse(**{**fields, **change})
    with pytest.raises(InvalidMessageError) as error:
        partial_from_message(malformed, path="begun[2]")
    assert str(error.value).startswith(problem)
