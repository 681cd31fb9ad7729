"""Bounds on what a worker submits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from vcpo.api import VCPORunSpec
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.packing import ExpertRoutes, RouterLayout
from vcpo.wire.trajectory import PartialResponse, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBounds:
    """Bounds of one run on trajectories and partial responses.

    A token id without a row in the embedding, a response longer than the model's context, or an
    extreme reward would break or spoil an update hours later. The learner refuses each of them
    while the sender is still known.
    """

    vocabulary_size: int | None
    """Tokens with a row in the embedding and in the head; None if unknown."""
    max_new_tokens: int
    """Tokens of a response, tokens of the environment included."""
    context_tokens: int | None
    """Tokens of prompt and response together; None if neither model nor run has a limit."""
    max_absolute_reward: float
    routers: RouterLayout | None = None
    """Layout of the model's routers, if the run replays routes."""

    @classmethod
    def from_spec(
        cls,
        spec: VCPORunSpec,
        *,
        vocabulary_size: int | None = None,
        model_context_tokens: int | None = None,
        routers: RouterLayout | None = None,
    ) -> Self:
        """Return the bounds of a run; None for a limit that the model does not have."""
        if problem := spec.sampling.room_problem(model_context_tokens):
            got = f"(got {spec.sampling.max_new_tokens})"
            raise ValueError(f"spec.sampling.maxNewTokens: {problem} {got}")
        contexts = model_context_tokens, spec.context_tokens
        return cls(
            vocabulary_size=vocabulary_size,
            max_new_tokens=spec.sampling.max_new_tokens,
            context_tokens=min((each for each in contexts if each is not None), default=None),
            max_absolute_reward=spec.environment.max_absolute_reward,
            routers=routers if spec.algorithm.router_replay else None,
        )

    def check_trajectory(self, trajectory: Trajectory, *, path: str) -> None:
        """Check a trajectory; `path` is its place in the message."""
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
        if trajectory.expert_routes is not None:
            self._check_routes(f"{path}.expert_routes", trajectory.expert_routes)

    def check_partial_response(self, partial: PartialResponse, *, path: str) -> None:
        """Check a partial response; an incomplete one must have room for one more token."""
        field, length = f"{path}.token_ids", len(partial.token_ids)
        self._check_tokens(field, partial.token_ids)
        is_complete = partial.finish_reason is not None
        if length >= self.max_new_tokens + is_complete:
            bound = f"at most {self.max_new_tokens} tokens, and fewer unless it is complete"
            raise InvalidMessageError(field, f"{length} tokens", bound)
        # The prompt has at least one token.
        if self.context_tokens is not None and length >= self.context_tokens:
            bound = f"at most {self.context_tokens - 1} tokens (the model's context)"
            raise InvalidMessageError(field, f"{length} tokens", bound)

    def _check_routes(self, field: str, routes: ExpertRoutes) -> None:
        own = self.routers
        if own is None:
            raise InvalidMessageError(field, "routes", "none (spec.algorithm.routerReplay)")
        for name in ("num_layers", "num_choices"):
            received, expected = getattr(routes, name), getattr(own, name)
            if received != expected:
                raise InvalidMessageError(f"{field}.{name}", received, f"{expected}, the model's")
        if (wrong := routes.first_beyond(own.num_experts)) is not None:
            raise InvalidMessageError(f"{field}.experts", wrong, f"0 to {own.num_experts - 1}")

    def _check_tokens(self, field: str, token_ids: Sequence[int]) -> None:
        size = self.vocabulary_size
        if size is None or max(token_ids) < size:
            return
        index = next(at for at, token_id in enumerate(token_ids) if token_id >= size)
        raise InvalidMessageError(f"{field}[{index}]", token_ids[index], f"0 to {size - 1}")
