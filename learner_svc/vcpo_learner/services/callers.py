"""Checks of a worker's call: who calls, and bounds on what it submits.

Each worker's name is bound to the key that its process shows.

```
first call under a name        binds the name to the key of that call
call with the bound key        goes on
call with another key          refused while the worker is registered or holds a lease
call for another's lease       refused
call after it was set aside    refused with the cause; another key begins anew
```
The role's key says that a caller is a worker; this says which. A worker keeps its key for itself,
so no other worker can lease, submit, release or offer weights in its name.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from vcpo.api import VCPORunSpec
from vcpo.wire.access.roles import IDENTITY
from vcpo.wire.errors import InvalidMessageError, PermissionDeniedError, SetAsideError, check_id
from vcpo.wire.packing import ExpertRoutes, RouterLayout
from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo_learner.ledger.dispatcher import Dispatcher

_FIRST_SWEEP = 1024


class Callers:
    """The names of workers and the keys that they are bound to. Owner: the learner's event loop.

    Names that are free again are forgotten when their number has doubled.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._identities: dict[str, str] = {}
        self._sweep_at = _FIRST_SWEEP

    def admit(self, worker_id: str, context: Any, *, lease_ids: Iterable[str] = ()) -> None:
        """Check that a call comes from the worker that it names, and that the leases are its own.

        context: the call's context; its metadata holds the worker's key. A worker that shows none
            can be impersonated by whoever shows none.
        lease_ids: leases that the call is about. One that has ended belongs to nobody.

        Raises:
            InvalidMessageError: if the name is empty or too long.
            PermissionDeniedError: if the name or a lease belongs to another worker.
            SetAsideError: if the learner has taken the worker out of the run.
        """
        check_id("worker_id", worker_id)
        shown = str(dict(context.invocation_metadata() or ()).get(IDENTITY, ""))
        bound = self._identities.get(worker_id, shown)
        is_same = hmac.compare_digest(shown.encode(), bound.encode())
        if not is_same and self._dispatcher.is_known(worker_id):
            raise PermissionDeniedError(
                f"worker_id: {worker_id!r:.80} is the name of a worker with another key, until it"
                " has been silent for a minute and its leases have ended; use another name"
            )
        self._check_set_aside(worker_id, is_same=is_same)
        for lease_id in lease_ids:
            holder = self._dispatcher.holder_of(lease_id)
            if holder not in {None, worker_id}:
                raise PermissionDeniedError(f"lease_id: {lease_id!r:.80} is another worker's")
        self._bind(worker_id, shown)

    def _check_set_aside(self, worker_id: str, *, is_same: bool) -> None:
        """Refuse the process that was set aside; let another one work under its name."""
        workers = self._dispatcher.set_aside_workers
        if not is_same:
            workers.readmit(worker_id)
        elif (worker := workers.get(worker_id)) is not None:
            raise SetAsideError(worker.cause, worker.message)

    def _bind(self, worker_id: str, identity: str) -> None:
        if len(self._identities) >= self._sweep_at:
            kept = {name for name in self._identities if self._is_bound(name)}
            self._identities = {name: self._identities[name] for name in kept}
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(kept))
        self._identities[worker_id] = identity

    def _is_bound(self, worker_id: str) -> bool:
        is_set_aside = worker_id in self._dispatcher.set_aside_workers
        return is_set_aside or self._dispatcher.is_known(worker_id)


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
        """Return the bounds of a run; None for a limit that the model does not have.

        Raises:
            ValueError: if the longest response leaves no room for a prompt in the model's context.
        """
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
        """Check a trajectory; `path` is its place in the message.

        Raises:
            InvalidMessageError: naming the first field that exceeds its bound.
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
        if trajectory.expert_routes is not None:
            self._check_routes(f"{path}.expert_routes", trajectory.expert_routes)

    def check_partial_response(self, partial: PartialResponse, *, path: str) -> None:
        """Check a partial response; an incomplete one must have room for one more token.

        Raises:
            InvalidMessageError: naming the first field that exceeds its bound.
        """
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
