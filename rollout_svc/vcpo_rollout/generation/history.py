"""One response in several turns as it comes about, and as it is gone on with after a cut.

```
prompt | sampled | inserted | sampled | inserted | sampled
       +------ replied -----+------ replied -----+-- open --+
```

Of an answer that was cut, the turns with a reply are history: whoever goes on has its environment
hear them and say the same again. The turn behind them is open: it goes on in the engine, or waits
to be heard when the model had ended it. What an end token does not end is under way, since turns
end at end tokens only; so the places of the inserted tokens are all that need travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from vcpo.wire.trajectory import FinishReason, PartialResponse, TokenSpan, VersionSpan
from vcpo_rollout.engines.engine import Generation, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of the model's, and what it was told then."""

    sampled: tuple[int, ...]
    """At least one token."""
    inserted: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class History:
    """Everything behind the prompt, turn by turn."""

    request: GenerationRequest
    """The prompt, and room for the whole response: inserted tokens count, since they take up the
    model's context and the learner's memory as sampled ones do."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    inserted_spans: list[TokenSpan] = field(default_factory=list)
    open_turn: PartialResponse | None = None
    """What somebody else has sampled of the next turn; complete when it has a finish reason."""

    @classmethod
    def resume(
        cls,
        request: GenerationRequest,
        partial_response: PartialResponse,
        replied: Sequence[Turn],
        end_token_ids: frozenset[int],
    ) -> Self:
        """Go on behind the turns that were `replied` to in an answer that was cut."""
        num_sampled = sum(len(turn.sampled) for turn in replied)
        size = num_sampled + sum(len(turn.inserted) for turn in replied)
        spans, open_spans = _split(partial_response.version_spans, num_sampled)
        history = cls(
            request=request,
            token_ids=list(partial_response.token_ids[:size]),
            logprobs=list(partial_response.logprobs[:num_sampled]),
            version_spans=spans,
            inserted_spans=list(partial_response.inserted_spans),
        )
        if size < len(partial_response.token_ids):
            ended = FinishReason.STOP if partial_response.token_ids[-1] in end_token_ids else None
            history.open_turn = PartialResponse(
                token_ids=partial_response.token_ids[size:],
                logprobs=partial_response.logprobs[num_sampled:],
                version_spans=tuple(open_spans),
                finish_reason=partial_response.finish_reason or ended,
            )
        return history

    @property
    def is_full(self) -> bool:
        """Whether there is no room for a further token."""
        return len(self.token_ids) >= self.request.max_new_tokens

    def next_request(self) -> GenerationRequest:
        """Ask for the next turn, or the rest of it, after everything before it."""
        return replace(
            self.request,
            prompt_token_ids=(*self.request.prompt_token_ids, *self.token_ids),
            max_new_tokens=self.request.max_new_tokens - len(self.token_ids),
            partial_response=self.open_turn,
        )

    def sampled(self, turn: Generation | PartialResponse) -> None:
        """Append a turn of the model's, with what was open of it."""
        self.open_turn = None
        self.token_ids.extend(turn.token_ids)
        self.logprobs.extend(turn.logprobs)
        self.version_spans.extend(turn.version_spans)

    def insert(self, token_ids: Sequence[int]) -> bool:
        """Append what the environment says, if that leaves room for another turn."""
        if len(self.token_ids) + len(token_ids) >= self.request.max_new_tokens:
            return False
        if token_ids:
            span = TokenSpan(start=len(self.token_ids), num_tokens=len(token_ids))
            self.inserted_spans.append(span)
            self.token_ids.extend(token_ids)
        return True

    def partial(self) -> PartialResponse | None:
        """Everything so far, for somebody else to go on with; None before the first token."""
        if not self.token_ids:
            return None
        return PartialResponse(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            version_spans=tuple(self.version_spans),
            inserted_spans=tuple(self.inserted_spans),
        )


def replied_turns(partial_response: PartialResponse, end_token_ids: frozenset[int]) -> list[Turn]:
    """The turns of an answer that was cut to which the environment has replied, in order.

    A turn with another one behind it was replied to, if only with nothing. Whether the last one
    was, when nothing stands behind it, is not known: it is to be heard again.
    """
    turns: list[tuple[list[int], list[int]]] = []
    for token_id, is_sampled in zip(
        partial_response.token_ids, partial_response.sampled_mask, strict=True
    ):
        if is_sampled and (not turns or turns[-1][1] or turns[-1][0][-1] in end_token_ids):
            turns.append(([], []))
        turns[-1][0 if is_sampled else 1].append(token_id)
    if not turns[-1][1]:
        turns.pop()
    return [Turn(sampled=tuple(said), inserted=tuple(told)) for said, told in turns]


def _split(
    spans: Sequence[VersionSpan], num_tokens: int
) -> tuple[list[VersionSpan], list[VersionSpan]]:
    """Labels of the first `num_tokens` sampled tokens, and of those behind them."""
    before, behind = [], []
    for span in spans:
        here = min(span.num_tokens, num_tokens)
        num_tokens -= here
        if here:
            before.append(replace(span, num_tokens=here))
        if here < span.num_tokens:
            behind.append(replace(span, num_tokens=span.num_tokens - here))
    return before, behind
