"""Trajectories and partial responses: records of both services, and their messages."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import xxhash

from vcpo.wire.errors import InvalidMessageError, check_id
from vcpo.wire.limits import MAX_REWARD_PARTS, MAX_ROUTE_BYTES, MAX_SHOWN_CHARACTERS, MAX_TOKENS
from vcpo.wire.packing import (
    ExpertRoutes,
    PackedTokenIds,
    pack_logprobs,
    pack_token_ids,
    unpack_logprobs,
    unpack_token_ids,
)
from vcpo.wire.v1 import work_pb2
from vcpo.wire.versions import age_steps, step_of


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """The model sampled its end token, or completed a stop string."""
    LENGTH = "length"
    """The response reached the largest number of new tokens."""


_TO_WIRE = {
    FinishReason.STOP: work_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: work_pb2.FINISH_REASON_LENGTH,
}
_FROM_WIRE = {number: reason for reason, number in _TO_WIRE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """A run of consecutive sampled tokens of one policy version."""

    policy_version: int
    num_tokens: int
    key_age_versions: int = 0
    """How many versions the oldest keys and values that its tokens may have read are older than the
    weights; 0 if they read none that is older. Else no version alone gives their
    log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """A run of consecutive response tokens."""

    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class _Versioned:
    """What was sampled by policy versions."""

    __slots__ = ()
    version_spans: tuple[VersionSpan, ...]

    @property
    def oldest_step(self) -> int:
        return min(step_of(span.policy_version) for span in self.version_spans)

    @property
    def newest_policy_version(self) -> int:
        return max(span.policy_version for span in self.version_spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialResponse(_Versioned):
    """The tokens of an interrupted response; a worker that resumes it keeps them unchanged."""

    token_ids: tuple[int, ...]
    """Tokens of the response so far, at least one; the first was sampled."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each sampled token under the version that sampled it."""
    version_spans: tuple[VersionSpan, ...]
    """Versions of the sampled tokens, in order; the lengths add up to their number."""
    finish_reason: FinishReason | None = None
    """Set if the response is complete and waits for the others of its group."""
    inserted_spans: tuple[TokenSpan, ...] = ()
    """Tokens that the environment wrote, in order and disjoint; all others were sampled."""
    prompt_xxh3: int = 0
    """Checksum of its prompt (`prompt_checksum`); 0 if unknown."""
    number: int = 0

    @property
    def num_sampled_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def sampled_mask(self) -> list[bool]:
        return _sampled_mask(len(self.token_ids), self.inserted_spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(_Versioned):
    """One response to a prompt, with its reward. Its sequences are never modified."""

    trajectory_id: str
    """Unique in the run: `<lease id>/<number in its group>`."""
    prompt_token_ids: Sequence[int]
    """Tokens of the prompt; `PackedTokenIds` if the trajectory was read from a message."""
    response_token_ids: Sequence[int]
    """All tokens after the prompt, at least one of them sampled."""
    rollout_logprobs: Sequence[float]
    """Natural log-probability of each sampled token under the version that sampled it."""
    version_spans: tuple[VersionSpan, ...]
    """Versions of the sampled tokens, in order; the lengths add up to their number."""
    reward: float
    finish_reason: FinishReason
    inserted_spans: tuple[TokenSpan, ...] = ()
    """Response tokens that the environment wrote, in order and disjoint. All other response tokens
    were sampled; only those are trained on and counted."""
    expert_routes: ExpertRoutes | None = None
    """The experts that computed the first tokens of prompt and response; None if unknown."""
    reward_parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Parts of the reward by name, for people; empty if its environment returned a number alone."""
    question: str = ""
    answer: str = ""
    """What the prompt asks last and its right answer, for people; `shown_text` of each."""
    worker_id: str | None = ""
    """The worker that sampled all of its tokens, as its lease has it; empty where nobody names
    workers. None: several sampled it, because one resumed what another had begun."""

    @property
    def lease_id(self) -> str:
        return self.trajectory_id.rpartition("/")[0]

    @property
    def number(self) -> int:
        return int(self.trajectory_id.rpartition("/")[2])

    @property
    def num_sampled_tokens(self) -> int:
        return len(self.rollout_logprobs)

    @property
    def sampled_mask(self) -> list[bool]:
        return _sampled_mask(len(self.response_token_ids), self.inserted_spans)

    @property
    def oldest_policy_version(self) -> int:
        return min(span.policy_version for span in self.version_spans)

    def num_fresh_tokens(self, policy_version: int) -> int:
        return sum(
            span.num_tokens
            for span in self.version_spans
            if span.policy_version == policy_version and span.key_age_versions == 0
        )

    def lags(self, policy_version: int) -> Iterator[tuple[int, int]]:
        for span in self.version_spans:
            yield age_steps(span.policy_version, policy_version), span.num_tokens


def shown_text(text: str) -> str:
    """Return the beginning of a text, as every message can hold it."""
    return text[:MAX_SHOWN_CHARACTERS].encode(errors="replace").decode()


def prompt_checksum(prompt_token_ids: Sequence[int]) -> int:
    """Return the checksum of a prompt: xxh3-64 of its packed token ids, never 0."""
    return xxhash.xxh3_64_intdigest(pack_token_ids(prompt_token_ids)) or 1


def trajectory_to_message(trajectory: Trajectory) -> work_pb2.Trajectory:
    """Return the message of a trajectory; log-probabilities are rounded to float32."""
    message = work_pb2.Trajectory()
    write_trajectory(message, trajectory)
    return message


def write_trajectory(message: work_pb2.Trajectory, trajectory: Trajectory) -> None:
    """Write a trajectory into an empty message, as `trajectory_to_message`.

    A message that is put into another one is copied; one that is written in its place is not.
    """
    message.trajectory_id = trajectory.trajectory_id
    message.prompt_token_ids = pack_token_ids(trajectory.prompt_token_ids)
    message.response_token_ids = pack_token_ids(trajectory.response_token_ids)
    message.rollout_logprobs = pack_logprobs(trajectory.rollout_logprobs)
    message.version_spans.extend(_span_messages(trajectory.version_spans))
    message.reward = trajectory.reward
    message.finish_reason = _TO_WIRE[trajectory.finish_reason]
    for inserted in trajectory.inserted_spans:
        message.inserted_spans.add(start=inserted.start, num_tokens=inserted.num_tokens)
    message.reward_parts.update(trajectory.reward_parts)
    message.question, message.answer = trajectory.question, trajectory.answer
    if (routes := trajectory.expert_routes) is not None:
        message.expert_routes.experts = routes.experts
        message.expert_routes.num_layers = routes.num_layers
        message.expert_routes.num_choices = routes.num_choices
        message.expert_routes.is_wide = routes.is_wide
    if trajectory.worker_id is not None:
        message.worker_id = trajectory.worker_id


def trajectory_from_message(message: work_pb2.Trajectory, *, path: str) -> Trajectory:
    """Read and check a message; `path` is its field, for the error."""
    check_id(f"{path}.trajectory_id", message.trajectory_id)
    prompt = _token_ids(f"{path}.prompt_token_ids", message.prompt_token_ids)
    response = _token_ids(f"{path}.response_token_ids", message.response_token_ids)
    inserted = _inserted_spans(f"{path}.inserted_spans", message.inserted_spans, len(response))
    size = len(response) - sum(span.num_tokens for span in inserted)
    logprobs = unpack_logprobs(f"{path}.rollout_logprobs", message.rollout_logprobs, count=size)
    spans = _spans(f"{path}.version_spans", message.version_spans, size)
    if not math.isfinite(message.reward):
        raise InvalidMessageError(f"{path}.reward", message.reward, "a finite number")
    reason = _FROM_WIRE.get(message.finish_reason)
    if reason is None:
        raise InvalidMessageError(f"{path}.finish_reason", message.finish_reason, "STOP or LENGTH")
    for name in ("question", "answer"):
        if (length := len(getattr(message, name))) > MAX_SHOWN_CHARACTERS:
            most = f"at most {MAX_SHOWN_CHARACTERS} characters"
            raise InvalidMessageError(f"{path}.{name}", f"{length} characters", most)
    return Trajectory(
        trajectory_id=message.trajectory_id,
        prompt_token_ids=prompt,
        response_token_ids=response,
        rollout_logprobs=logprobs,
        version_spans=spans,
        reward=message.reward,
        finish_reason=reason,
        inserted_spans=inserted,
        expert_routes=_expert_routes(f"{path}.expert_routes", message, len(prompt) + len(response)),
        reward_parts=_reward_parts(f"{path}.reward_parts", message.reward_parts),
        question=message.question,
        answer=message.answer,
        worker_id=message.worker_id if message.HasField("worker_id") else None,
    )


def partial_to_message(partial: PartialResponse) -> work_pb2.PartialResponse:
    """Return the message of a partial response; log-probabilities are rounded to float32."""
    reason = partial.finish_reason
    return work_pb2.PartialResponse(
        token_ids=pack_token_ids(partial.token_ids),
        logprobs=pack_logprobs(partial.logprobs),
        version_spans=_span_messages(partial.version_spans),
        finish_reason=work_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _TO_WIRE[reason],
        inserted_spans=_inserted_messages(partial.inserted_spans),
        prompt_xxh3=partial.prompt_xxh3,
        number=partial.number,
    )


def partial_from_message(message: work_pb2.PartialResponse, *, path: str) -> PartialResponse:
    """Read and check a message; `path` is its field, for the error."""
    token_ids = _token_ids(f"{path}.token_ids", message.token_ids)
    inserted_path = f"{path}.inserted_spans"
    inserted = _inserted_spans(inserted_path, message.inserted_spans, len(token_ids), first=1)
    size = len(token_ids) - sum(span.num_tokens for span in inserted)
    logprobs = unpack_logprobs(f"{path}.logprobs", message.logprobs, count=size)
    spans = _spans(f"{path}.version_spans", message.version_spans, size)
    unfinished = message.finish_reason == work_pb2.FINISH_REASON_UNSPECIFIED
    if not unfinished and message.finish_reason not in _FROM_WIRE:
        requirement = "UNSPECIFIED, STOP or LENGTH"
        raise InvalidMessageError(f"{path}.finish_reason", message.finish_reason, requirement)
    return PartialResponse(
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        version_spans=spans,
        finish_reason=None if unfinished else _FROM_WIRE[message.finish_reason],
        inserted_spans=inserted,
        prompt_xxh3=message.prompt_xxh3,
        number=message.number,
    )


def _expert_routes(
    field: str, trajectory: work_pb2.Trajectory, num_tokens: int
) -> ExpertRoutes | None:
    if not trajectory.HasField("expert_routes"):
        return None
    message = trajectory.expert_routes
    for name in ("num_layers", "num_choices"):
        if getattr(message, name) < 1:
            raise InvalidMessageError(f"{field}.{name}", 0, "at least 1")
    size, token_bytes = (
        len(message.experts),
        message.num_layers * message.num_choices * (1 + message.is_wide),
    )
    most = min(num_tokens * token_bytes, MAX_ROUTE_BYTES)
    if size % token_bytes or not token_bytes <= size <= most:
        bound = f"a multiple of {token_bytes} bytes (a token's), at most {most}"
        raise InvalidMessageError(f"{field}.experts", f"{size} bytes", bound)
    return ExpertRoutes(
        experts=message.experts,
        num_layers=message.num_layers,
        num_choices=message.num_choices,
        is_wide=message.is_wide,
    )


def _reward_parts(field: str, parts: Mapping[str, float]) -> dict[str, float]:
    if len(parts) > MAX_REWARD_PARTS:
        raise InvalidMessageError(field, f"{len(parts)} parts", f"at most {MAX_REWARD_PARTS}")
    for name, part in parts.items():
        check_id(field, name)
        if not math.isfinite(part):
            raise InvalidMessageError(f"{field}.{name}", part, "a finite number")
    return dict(parts)


def _sampled_mask(num_tokens: int, inserted: Iterable[TokenSpan]) -> list[bool]:
    mask = [True] * num_tokens
    for span in inserted:
        mask[span.start : span.end] = [False] * span.num_tokens
    return mask


def _token_ids(field: str, data: bytes) -> PackedTokenIds:
    return unpack_token_ids(field, data, most=MAX_TOKENS)


def _span_messages(spans: Iterable[VersionSpan]) -> list[work_pb2.VersionSpan]:
    return [
        work_pb2.VersionSpan(
            policy_version=span.policy_version,
            num_tokens=span.num_tokens,
            key_age_versions=span.key_age_versions,
        )
        for span in spans
    ]


def _spans(
    field: str, messages: Sequence[work_pb2.VersionSpan], num_tokens: int
) -> tuple[VersionSpan, ...]:
    spans = tuple(
        VersionSpan(
            policy_version=span.policy_version,
            num_tokens=span.num_tokens,
            key_age_versions=span.key_age_versions,
        )
        for span in messages
    )
    for span in spans:
        if span.num_tokens < 1:
            raise InvalidMessageError(field, "an empty span", "spans of at least 1 token")
        if (age := span.key_age_versions) > span.policy_version:
            requirement = f"at most the span's version ({span.policy_version})"
            raise InvalidMessageError(f"{field}.key_age_versions", age, requirement)
    covered = sum(span.num_tokens for span in spans)
    if covered != num_tokens:
        requirement = f"spans over all sampled tokens ({num_tokens})"
        raise InvalidMessageError(field, f"spans over {covered} tokens", requirement)
    return spans


def _inserted_messages(spans: Iterable[TokenSpan]) -> list[work_pb2.TokenSpan]:
    return [work_pb2.TokenSpan(start=span.start, num_tokens=span.num_tokens) for span in spans]


def _inserted_spans(
    field: str, messages: Sequence[work_pb2.TokenSpan], num_tokens: int, *, first: int = 0
) -> tuple[TokenSpan, ...]:
    """Read spans of a response of `num_tokens`, none before the token `first`."""
    spans = tuple(TokenSpan(start=span.start, num_tokens=span.num_tokens) for span in messages)
    end = first
    for index, span in enumerate(spans):
        if span.num_tokens < 1 or not end <= span.start < span.end <= num_tokens:
            received = f"{span.num_tokens} tokens from {span.start}"
            requirement = f"at least 1 token from {end} on, within the response ({num_tokens})"
            raise InvalidMessageError(f"{field}[{index}]", received, requirement)
        end = span.end
    if sum(span.num_tokens for span in spans) == num_tokens:
        raise InvalidMessageError(field, "the whole response", "less than the response")
    return spans
