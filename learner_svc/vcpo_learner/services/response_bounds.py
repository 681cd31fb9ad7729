"""What no answer of a run may be beyond, whoever sends it.

A token that the model has no row for, an answer longer than the model reaches, or a reward that
drowns all others ends an update, or spoils it, hours after it was accepted. So each is refused at
the door, by the name of its field, while somebody knows where it came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vcpo.spec import VCPORunSpec
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.trajectory import PartialResponse, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBounds:
    """Bounds of one run on what its workers submit and hand back."""

    vocabulary_size: int | None
    """Tokens that the model both reads and scores; None is unknown."""
    max_new_tokens: int
    """Of the response, tokens of the environment included."""
    context_tokens: int | None
    """Longest prompt and response together; None when the model names no limit."""
    max_absolute_reward: float

    def check_trajectory(self, trajectory: Trajectory, *, path: str) -> None:
        """Check a trajectory; `path` is where it stands, for the error.

        Raises:
            InvalidMessageError: naming the first field that is beyond its bound.
        """
        prompt, response = trajectory.prompt_token_ids, trajectory.response_token_ids
        self._check_tokens(f"{path}.prompt_token_ids", prompt)
        field = f"{path}.response_token_ids"
        self._check_tokens(field, response)
        if len(response) > self.max_new_tokens:
            bound = f"at most {self.max_new_tokens} tokens (spec.sampling.maxNewTokens)"
            raise InvalidMessageError(field, f"{len(response)} tokens", bound)
        length = len(prompt) + len(response)
        if self.context_tokens is not None and length > self.context_tokens:
            bound = f"at most {self.context_tokens} tokens with the prompt (the model's context)"
            raise InvalidMessageError(field, f"{length} tokens", bound)
        most = self.max_absolute_reward
        if abs(trajectory.reward) > most:
            bound = f"{-most:g} to {most:g} (spec.environment.maxAbsoluteReward)"
            raise InvalidMessageError(f"{path}.reward", trajectory.reward, bound)

    def check_partial_response(self, begun: PartialResponse, *, path: str) -> None:
        """Check an answer that was begun; one that is not complete needs room for a further token.

        Raises:
            InvalidMessageError: naming the first field that is beyond its bound.
        """
        field, length = f"{path}.token_ids", len(begun.token_ids)
        self._check_tokens(field, begun.token_ids)
        if length >= self.max_new_tokens + (begun.finish_reason is not None):
            bound = (
                f"shorter than {self.max_new_tokens} tokens unless it is complete, and no longer"
            )
            raise InvalidMessageError(field, f"{length} tokens", bound)
        # The prompt before it has at least one.
        if self.context_tokens is not None and length >= self.context_tokens:
            bound = f"at most {self.context_tokens - 1} tokens (the model's context)"
            raise InvalidMessageError(field, f"{length} tokens", bound)

    def _check_tokens(self, field: str, token_ids: Sequence[int]) -> None:
        size = self.vocabulary_size
        if size is None or max(token_ids) < size:
            return
        index = next(at for at, token_id in enumerate(token_ids) if token_id >= size)
        raise InvalidMessageError(f"{field}[{index}]", token_ids[index], f"0 to {size - 1}")


def response_bounds(
    spec: VCPORunSpec,
    *,
    vocabulary_size: int | None = None,
    model_context_tokens: int | None = None,
) -> ResponseBounds:
    """The bounds of a run; None where the model names none.

    Raises:
        ValueError: when the longest response leaves no room for a prompt in the model's context.
    """
    if problem := spec.sampling.room_problem(model_context_tokens):
        got = f"(got {spec.sampling.max_new_tokens})"
        raise ValueError(f"spec.sampling.maxNewTokens: {problem} {got}")
    return ResponseBounds(
        vocabulary_size=vocabulary_size,
        max_new_tokens=spec.sampling.max_new_tokens,
        context_tokens=model_context_tokens,
        max_absolute_reward=spec.environment.max_absolute_reward,
    )
