"""What workers and hosts call: leases, submissions within bounds, manifests; signals, limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from vcpo.api import VCPORunSpec
from vcpo.control.limits import lag_change_kind, lag_change_sentence
from vcpo.records.reasons import WeightUpdates
from vcpo.wire.errors import InvalidMessageError, SetAsideError, check_id, check_wait
from vcpo.wire.failures import failure_from_message
from vcpo.wire.limits import MAX_PARTIAL_TOKENS
from vcpo.wire.packing import ExpertRoutes, RouterLayout
from vcpo.wire.phase import RunPhase, phase_to_message
from vcpo.wire.trajectory import (
    PartialResponse,
    Trajectory,
    partial_from_message,
    partial_to_message,
    trajectory_from_message,
)
from vcpo.wire.v1 import (
    control_pb2,
    control_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    work_pb2,
    work_pb2_grpc,
)
from vcpo_learner.ledger.admission import WorkRequest
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.lease import Lease, Purpose, SubmitOutcome
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.weights.store import PolicyStore

_MAX_SEQUENCES = 65_536
_RETRY_AFTER_S = 0.5
_SPLITS = {
    Purpose.TRAIN: work_pb2.SPLIT_TRAIN,
    Purpose.EVALUATION: work_pb2.SPLIT_EVALUATION,
}
_OUTCOMES = {
    SubmitOutcome.ACCEPTED: work_pb2.SUBMIT_OUTCOME_ACCEPTED,
    SubmitOutcome.DUPLICATE: work_pb2.SUBMIT_OUTCOME_DUPLICATE,
    SubmitOutcome.LEASE_ENDED: work_pb2.SUBMIT_OUTCOME_LEASE_ENDED,
}


class WorkService(work_pb2_grpc.WorkServiceServicer):
    """Checks the messages of workers and passes them to the dispatcher."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        spec: VCPORunSpec,
        bounds: ResponseBounds | None = None,
    ) -> None:
        """Serve a dispatcher.

        bounds: of the run's model; None applies the bounds of the spec only.
        """
        self._dispatcher = dispatcher
        self._spec = spec
        self._bounds = bounds or ResponseBounds.from_spec(spec)

    async def Lease(  # noqa: N802 - named by the contract
        self, request: work_pb2.LeaseRequest, context: Any
    ) -> work_pb2.LeaseResponse:
        """Grant admissible prompts; wait for some up to `wait_seconds`."""
        for field in ("worker_id", "process_id", "rollout_group"):
            check_id(field, getattr(request, field))
        if (worker := self._dispatcher.registry.set_aside_process(request.process_id)) is not None:
            raise SetAsideError(worker.cause, worker.message)
        if not 1 <= request.max_trajectories <= _MAX_SEQUENCES:
            requirement = f"1 to {_MAX_SEQUENCES}"
            raise InvalidMessageError("max_trajectories", request.max_trajectories, requirement)
        work = WorkRequest(
            worker_id=request.worker_id,
            process_id=request.process_id,
            rollout_group=request.rollout_group,
            incarnation=request.incarnation,
            held_policy_version=request.held_policy_version,
            max_trajectories=request.max_trajectories,
            weight_updates=WeightUpdates(
                in_flight=request.weight_updates_in_flight,
                adapter_swaps=request.adapter_swaps,
                merged=request.merged_versions,
            ),
            peak_memory_bytes=request.peak_memory_bytes,
            held_lease_ids=(
                frozenset(request.held_leases.lease_ids)
                if request.HasField("held_leases")
                else None
            ),
        )
        wait_s = check_wait("wait_seconds", request.wait_seconds)
        leases = await self._dispatcher.lease(work, wait_s=wait_s)
        phase = self._dispatcher.phase
        return work_pb2.LeaseResponse(
            leases=[_lease_message(lease, self._spec) for lease in leases],
            phase=phase_to_message(phase),
            retry_after_seconds=0.0 if phase is not RunPhase.RUNNING else _RETRY_AFTER_S,
        )

    async def Submit(  # noqa: N802 - named by the contract
        self, request: work_pb2.SubmitRequest, context: Any
    ) -> work_pb2.SubmitResponse:
        """Accept trajectories, or a failure in their place; answer when the ledger keeps them."""
        check_id("worker_id", request.worker_id)
        check_id("lease_id", request.lease_id)
        if request.HasField("failure"):
            if request.trajectories:
                raise InvalidMessageError("failure", "set", "absent when trajectories are sent")
            failure = failure_from_message(request.failure)
            self._dispatcher.fail(request.worker_id, request.lease_id, failure)
            return work_pb2.SubmitResponse()
        if not request.trajectories:
            raise InvalidMessageError("trajectories", "none", "at least one, or a failure")
        trajectories = [
            trajectory_from_message(message, path=f"trajectories[{index}]")
            for index, message in enumerate(request.trajectories)
        ]
        for index, trajectory in enumerate(trajectories):
            self._bounds.check_trajectory(trajectory, path=f"trajectories[{index}]")
        outcomes = self._dispatcher.submit(
            request.worker_id, request.lease_id, trajectories, request
        )
        await self._dispatcher.ledger.log.wait_until_kept()
        return work_pb2.SubmitResponse(
            outcomes=[_OUTCOMES[outcome] for outcome in outcomes],
            preempted_lease_ids=self._dispatcher.ledger.preempted_leases(request.worker_id),
        )

    async def Release(  # noqa: N802 - named by the contract
        self, request: work_pb2.ReleaseRequest, context: Any
    ) -> work_pb2.ReleaseResponse:
        """End some or all leases of a worker; answer when their partial responses are kept."""
        check_id("worker_id", request.worker_id)
        partials = self._partial_responses(request)
        released = self._dispatcher.release(request.worker_id, request.lease_ids, partials)
        if partials:
            await self._dispatcher.ledger.log.wait_until_kept()
        return work_pb2.ReleaseResponse(num_released=released)

    def _partial_responses(self, request: work_pb2.ReleaseRequest) -> list[PartialResponse]:
        """Read and check the partial responses of a released lease."""
        if request.begun and len(request.lease_ids) != 1:
            requirement = "the one lease that `begun` was sampled for"
            raise InvalidMessageError("lease_ids", f"{len(request.lease_ids)} leases", requirement)
        partials = [
            partial_from_message(message, path=f"begun[{index}]")
            for index, message in enumerate(request.begun)
        ]
        num_tokens = sum(len(partial.token_ids) for partial in partials)
        if num_tokens > MAX_PARTIAL_TOKENS:
            requirement = f"at most {MAX_PARTIAL_TOKENS} tokens in all"
            raise InvalidMessageError("begun", f"{num_tokens} tokens", requirement)
        for index, partial in enumerate(partials):
            self._bounds.check_partial_response(partial, path=f"begun[{index}]")
            if partial.prompt_xxh3 != partials[0].prompt_xxh3:
                requirement = "that of begun[0], because a lease has one prompt"
                name = f"begun[{index}].prompt_xxh3"
                raise InvalidMessageError(name, partial.prompt_xxh3, requirement)
        return partials


def _lease_message(lease: Lease, spec: VCPORunSpec) -> work_pb2.Lease:
    for_training = lease.purpose is Purpose.TRAIN
    return work_pb2.Lease(
        lease_id=lease.lease_id,
        split=_SPLITS[lease.purpose],
        prompt_index=lease.prompt_index,
        num_trajectories=lease.num_trajectories,
        sampling=work_pb2.Sampling(
            temperature=(
                spec.sampling.temperature if for_training else spec.evaluation.temperature
            ),
            max_new_tokens=spec.sampling.max_new_tokens,
            seed=lease.seed(spec.seed),
        ),
        granted_policy_version=lease.policy_version,
        timeout_seconds=spec.lease.timeout_seconds,
        begun=[partial_to_message(partial) for partial in lease.partial_responses],
        response_numbers=lease.response_numbers,
    )


class PolicyService(policy_pb2_grpc.PolicyServiceServicer):
    """Describes the policy store's newest version, and names a worker's preempted leases."""

    def __init__(self, store: PolicyStore, dispatcher: Dispatcher) -> None:
        self._store = store
        self._dispatcher = dispatcher

    async def GetManifest(  # noqa: N802 - named by the contract
        self, request: policy_pb2.GetManifestRequest, context: Any
    ) -> policy_pb2.PolicyManifest:
        """Describe the newest version; wait for one that the caller does not hold."""
        check_id("worker_id", request.worker_id)
        self._dispatcher.registry.record_contact(request.worker_id)
        holds_one = request.HasField("held_policy_version")
        newest = await self._store.wait_for_newest(
            held_incarnation=request.held_incarnation,
            held_version=request.held_policy_version if holds_one else None,
            wait_s=check_wait("wait_seconds", request.wait_seconds),
        )
        if not (preempted := self._dispatcher.ledger.preempted_leases(request.worker_id)):
            return newest  # the same to every worker
        manifest = policy_pb2.PolicyManifest(preempted_lease_ids=preempted)
        manifest.MergeFrom(newest)
        return manifest


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


@dataclass(slots=True, kw_only=True, eq=False)
class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Lets the operator or the local host observe and limit the run."""

    dispatcher: Dispatcher
    signals: SignalWindow
    drain: Callable[[str], None]
    event: Callable[[str, str], None]

    async def GetSignals(  # noqa: N802 - named by the contract
        self, request: control_pb2.GetSignalsRequest, context: Any
    ) -> control_pb2.Signals:
        return self.signals.message()

    async def SetThrottle(  # noqa: N802 - named by the contract
        self, request: control_pb2.SetThrottleRequest, context: Any
    ) -> control_pb2.SetThrottleResponse:
        """Set the lag limit for new work; return the limit that now applies.

        A change is an event and a line in the log, with the reason that the host gave.
        """
        before = self.dispatcher.lag_limit_steps
        lag_steps = self.dispatcher.throttle(request.lag_limit_steps)
        if lag_steps != before:
            sentence = lag_change_sentence(before, lag_steps, request.reason)
            self.event(lag_change_kind(before, lag_steps), sentence)
        return control_pb2.SetThrottleResponse(lag_limit_steps=lag_steps)

    async def Drain(  # noqa: N802 - named by the contract
        self, request: control_pb2.DrainRequest, context: Any
    ) -> control_pb2.DrainResponse:
        self.drain(request.reason or "asked for")
        return control_pb2.DrainResponse(phase=phase_to_message(self.dispatcher.phase))

    async def ReleaseWorker(  # noqa: N802 - named by the contract
        self, request: control_pb2.ReleaseWorkerRequest, context: Any
    ) -> control_pb2.ReleaseWorkerResponse:
        """End all leases of a worker that died; its name is free again."""
        check_id("worker_id", request.worker_id)
        released = self.dispatcher.release(request.worker_id, ())
        return control_pb2.ReleaseWorkerResponse(num_released=released)
