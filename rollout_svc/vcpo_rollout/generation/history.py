"""The tokens of one multi-turn response, turn by turn, and how an interrupted one is resumed.

```
prompt | sampled | inserted | sampled | inserted | sampled
       +------ replied -----+------ replied -----+-- open --+
```

The replied turns of an interrupted response are its history: the worker that resumes it replays
them, and its environment must reply as before. The turn after them is open: the engine continues
it, or the environment replies to it if the model had ended it. A turn ends at an end token or with
a stop string, and another one is unfinished. So the spans of the inserted tokens are all that a
partial response must carry besides its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from vcpo.wire.trajectory import FinishReason, PartialResponse, TokenSpan, VersionSpan
from vcpo_rollout.engines.engine import Generation, GenerationRequest, SequenceSampler
from vcpo_rollout.engines.stop_strings import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the model and the environment's reply, as tokens."""

    sampled: tuple[int, ...]
    """Tokens that the model sampled, at least one."""
    inserted: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endings:
    """What ends a turn of the model."""

    token_ids: frozenset[int]
    stop_strings: StopStrings | None = None
    """Strings that end a turn; None if only end tokens do."""

    @classmethod
    def of(cls, engine: SequenceSampler) -> Self:
        return cls(token_ids=engine.end_token_ids, stop_strings=engine.stop_strings)

    def end(self, turn: Sequence[int]) -> bool:
        return turn[-1] in self.token_ids or (
            self.stop_strings is not None and self.stop_strings.completed_by_last(turn)
        )


@dataclass(slots=True, kw_only=True)
class History:
    """All tokens after the prompt, turn by turn."""

    request: GenerationRequest
    """The prompt, and the limit of the whole response. Inserted tokens count, since they use the
    model's context and the learner's memory as sampled ones do."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    inserted_spans: list[TokenSpan] = field(default_factory=list)
    open_turn: PartialResponse | None = None
    """Tokens of the next turn that another worker sampled; complete if they have a finish
    reason."""

    @classmethod
    def resume(
        cls,
        request: GenerationRequest,
        partial_response: PartialResponse,
        turns: Sequence[Turn],
        endings: Endings,
    ) -> Self:
        """Return the history of an interrupted response, of which `turns` were replied to."""
        num_sampled = sum(len(turn.sampled) for turn in turns)
        size = num_sampled + sum(len(turn.inserted) for turn in turns)
        spans, open_spans = _split(partial_response.version_spans, num_sampled)
        history = cls(
            request=request,
            token_ids=list(partial_response.token_ids[:size]),
            logprobs=list(partial_response.logprobs[:num_sampled]),
            version_spans=spans,
            inserted_spans=list(partial_response.inserted_spans),
        )
        if size < len(partial_response.token_ids):
            token_ids = partial_response.token_ids[size:]
            finish_reason = FinishReason.STOP if endings.end(token_ids) else None
            history.open_turn = PartialResponse(
                token_ids=token_ids,
                logprobs=partial_response.logprobs[num_sampled:],
                version_spans=tuple(open_spans),
                finish_reason=partial_response.finish_reason or finish_reason,
            )
        return history

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) >= self.request.max_new_tokens

    def next_request(self) -> GenerationRequest:
        return replace(
            self.request,
            prompt_token_ids=(*self.request.prompt_token_ids, *self.token_ids),
            max_new_tokens=self.request.max_new_tokens - len(self.token_ids),
            partial_response=self.open_turn,
        )

    def append_sampled(self, turn: Generation | PartialResponse) -> None:
        self.open_turn = None
        self.token_ids.extend(turn.token_ids)
        self.logprobs.extend(turn.logprobs)
        self.version_spans.extend(turn.version_spans)

    def insert(self, token_ids: Sequence[int]) -> bool:
        """Append a reply; return False, and append nothing, if no turn would fit after it."""
        if len(self.token_ids) + len(token_ids) >= self.request.max_new_tokens:
            return False
        if token_ids:
            span = TokenSpan(start=len(self.token_ids), num_tokens=len(token_ids))
            self.inserted_spans.append(span)
            self.token_ids.extend(token_ids)
        return True

    def to_partial_response(self) -> PartialResponse | None:
        """Return all tokens so far, which another worker can resume; None before the first."""
        if not self.token_ids:
            return None
        return PartialResponse(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            version_spans=tuple(self.version_spans),
            inserted_spans=tuple(self.inserted_spans),
        )


def replied_turns(partial_response: PartialResponse, endings: Endings) -> list[Turn]:
    """Return the turns of an interrupted response to which the environment replied, in order.

    A turn that another turn follows was replied to, perhaps with an empty reply. For a last turn
    with nothing after it this is unknown: the environment must reply to it again.
    """
    turns: list[tuple[list[int], list[int]]] = []
    sampled_mask = partial_response.sampled_mask
    for token_id, is_sampled in zip(partial_response.token_ids, sampled_mask, strict=True):
        if is_sampled and (not turns or turns[-1][1] or endings.end(turns[-1][0])):
            turns.append(([], []))
        turns[-1][0 if is_sampled else 1].append(token_id)
    if not turns[-1][1]:
        turns.pop()
    return [Turn(sampled=tuple(sampled), inserted=tuple(inserted)) for sampled, inserted in turns]


def _split(
    spans: Sequence[VersionSpan], num_tokens: int
) -> tuple[list[VersionSpan], list[VersionSpan]]:
    first, rest = [], []
    for span in spans:
        num_first = min(span.num_tokens, num_tokens)
        num_tokens -= num_first
        if num_first:
            first.append(replace(span, num_tokens=num_first))
        if num_first < span.num_tokens:
            rest.append(replace(span, num_tokens=span.num_tokens - num_first))
    return first, rest
