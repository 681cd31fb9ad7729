r"""One update: from groups of trajectories with rewards to one optimizer step.

    score       log pi of every token, and gradient norms if the baseline needs them (`gradient`)
    weigh       advantages and coefficients from the whole batch (`estimator`)
    accumulate  the gradient; already while scoring, if each group decides for itself (`gradient`)
    decide      ESS, scale of the learning rate, refusal (`batch_decision`)
    step        AdamW, or what the run chose, at the scaled rate (`optimizer`)

A step that cannot be taken is skipped: parameters, moments and warm-up do not change. The schedule
of the learning rate counts it.

Source: VCPO, arXiv 2602.17616. Departures from the released reference: `vcpo.algo` lists them.
"""

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.ess.unit import EssReading
from vcpo.algo.ess.verdict import RefusalReason, StepLimits, StepVerdict
from vcpo.algo.health.fresh_tokens import FreshBlock
from vcpo.algo.health.guards import RateBackoff
from vcpo.api import VCPORunSpec
from vcpo.metrics.device_memory import device_memory
from vcpo.records.reasons import SkipReason
from vcpo.records.step_record import EffectiveRate, rate_fields
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.checkpoints.manifest import FileChecksum
from vcpo_learner.checkpoints.tensor_files import TensorFiles
from vcpo_learner.clock import Clock
from vcpo_learner.device import computes, random_states, restore_random_states
from vcpo_learner.estimator.trial import require_own_functions
from vcpo_learner.forward.attention import take_calls
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.replayable import require_replayable
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer, clip_gradient
from vcpo_learner.optimizer.step_rate import StepRate
from vcpo_learner.ranks.commands import Commands, Groups, on_every_rank
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.ranks.sharding import recover, release
from vcpo_learner.update.batch_decision import (
    StepDecision,
    batch_ess_unit,
    batch_moments,
    clamped_exp,
    decide_step,
    diagnostics,
    ess_by_lag,
    mean_surprisal,
    on_policy_ess_ratio,
    on_policy_weight,
    rewards_by_worker,
    tokens_by_lag,
)
from vcpo_learner.update.fresh_tokens import Mismatch
from vcpo_learner.update.gradient import checked_gradient
from vcpo_learner.update.replay import replay_buffer
from vcpo_learner.update.result import BatchGradient, PendingStep, UpdateResult, UpdateTimes
from vcpo_learner.update.run_health import RunHealth


class PolicyUpdate:
    """Trains a causal language model in place; owns its optimizer and its calibration.

    The model stays in evaluation mode: with dropout, learner and rollout workers would disagree
    about the policy. Rank 0 calls it; what changes the model is done on all ranks together. Replay
    is with rank 0, which draws the batch. Owner: the tensor thread.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: VCPORunSpec,
        pad_token_id: int,
        clock: Clock = time.monotonic,
        ranks: Ranks | None = None,
        commands: Commands | None = None,
    ) -> None:
        """Take over a model; with several ranks, the `PolicyNetwork` that is cut over them.

        commands: bring the other ranks what rank 0 calls; None: every rank is called by itself.
        """
        self.commands = commands
        if commands is not None:
            for each in ("begin", "finish", "save_tensors", "load_tensors", "load_shared_state"):
                commands.on(each, getattr(self, each))
        self._clock = clock
        self._network = PolicyNetwork.of(model.eval())
        self._model = self._network.model
        self._algorithm = spec.algorithm
        self._max_gradient_norm = spec.optimizer.max_gradient_norm
        self.step_rate = StepRate(spec)
        require_own_functions(spec)
        self._gradient = checked_gradient(self._network, spec, pad_token_id, ranks, clock)
        if spec.algorithm.router_replay:
            require_replayable(self._network)
        release(self._network)  # so that the optimizer sees the shards of all parameters
        self._optimizer = PolicyOptimizer(self._model, spec.optimizer)
        group = None if ranks is None else ranks.checkpoint_group
        self._files = TensorFiles(self._model, self._optimizer, group)
        self._mismatch = Mismatch(spec)
        self.health = RunHealth(spec)
        self._replay = replay_buffer(spec)
        self._pending: PendingStep | None = None
        """The step between `begin` and `finish`."""
        self._is_stepping = False
        """Stays True if a step fails after it began to change parameters or optimizer, or if the
        model cannot be used after an error."""

    @property
    def is_whole(self) -> bool:
        """Whether parameters and optimizer are of the same step, and their device computes.

        Also whether the ranks agree.
        """
        is_broken = self.commands is not None and self.commands.is_broken
        return not is_broken and not self._is_stepping and computes(self._device)

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def step(self, groups: Groups, *, policy_version: int) -> UpdateResult:
        self.begin(self.draw(groups), policy_version=policy_version)
        return self.finish()

    def draw(self, groups: Groups) -> Groups:
        return groups if self._replay is None else self._replay.exchange(groups)

    @on_every_rank
    def begin(self, groups: Groups, *, policy_version: int) -> PendingStep:
        """Compute the gradient of a batch; the parameters' `.grad` hold it until `finish`.

        groups: [num_prompts][trajectories]; the trajectories of one prompt make one group.
        policy_version: of the model's parameters; tokens that it sampled calibrate the on-policy
            ESS ratio.
        Raises: ValueError for an empty batch or group, and as `batch_advantages`. A critic does not
            change then. With several ranks also LostRankError, as every method that they do
            together (`Commands.call`).
        """
        self._pending = None
        if not all(groups) or not groups:
            raise ValueError("groups is empty: at least one trajectory is needed")
        self._optimizer.zero_grad()
        take_calls()
        before = deepcopy(self._gradient.state_dict())
        times = UpdateTimes()
        batch: BatchGradient | NonFiniteWeightError
        try:
            batch = self._accumulate(groups, policy_version, times)
        except NonFiniteWeightError as error:
            batch = error
        except Exception:  # the model's own code runs there; the batch may be tried again
            self._gradient.load_state_dict(before)
            self._recover()
            raise
        finally:
            release(self._network)
        trajectories = tuple(chain.from_iterable(groups))
        num_blocks = len(batch.fresh) if isinstance(batch, BatchGradient) else 0
        num_tokens = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
        self._pending = PendingStep(
            trajectories=trajectories,
            policy_version=policy_version,
            batch=batch,
            wanted_fresh_tokens=self._mismatch.wanted_fresh_tokens(num_blocks, num_tokens),
            times=times,
        )
        return self._pending

    @on_every_rank
    def finish(self, newest: Sequence[Trajectory] = ()) -> UpdateResult:
        """Decide the step of the last `begin` and take it, or skip it and say why.

        newest: responses beside the batch with tokens of the pending step's version. They are
            scored before the step and calibrate; they do not change the gradient.
        """
        pending, started_s = self._pending, self._clock()
        if pending is None:
            raise RuntimeError("finish without begin")
        fresh = self._gradient.score_fresh(newest, pending.policy_version)
        scored_s = self._clock()
        result = self._conclude(pending, fresh)
        self._pending = None
        pending.times.score_s += scored_s - started_s
        pending.times.optimizer_s = self._clock() - scored_s
        return replace(
            result,
            times=pending.times,
            memory=device_memory(torch.cuda, self._device),
            attention_calls=take_calls(),
        )

    def _conclude(self, pending: PendingStep, fresh: tuple[FreshBlock, ...]) -> UpdateResult:
        """Decide the step and take or skip it; fresh: of responses beside the batch."""
        batch = pending.batch
        if isinstance(batch, BatchGradient):
            fresh = batch.fresh + fresh
        review = self._mismatch.observe(fresh)
        if isinstance(batch, NonFiniteWeightError):
            result = self._refuse(pending.trajectories, batch)
        else:
            try:
                limits = self.step_rate.limits(mean_surprisal(pending.trajectories))
                result = self._take_or_skip(pending, batch, self._decide(batch, limits))
            except NonFiniteWeightError as error:
                result = self._refuse(pending.trajectories, error)
        return replace(result, fresh=fresh, mismatch=review)

    def _recover(self) -> None:
        self._is_stepping = True
        self._is_stepping = not recover(self._network)

    @on_every_rank
    def save_tensors(self, folder: Path | str) -> Future[dict[str, FileChecksum]]:
        """Copy parameters and moments, and write the copies beside the next steps.

        Returns the checksums of the files by name.
        """
        return self._files.save(Path(folder))

    @on_every_rank
    def load_tensors(self, folder: Path | str) -> None:
        self._files.load(Path(folder))

    def close(self) -> None:
        self._files.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on beside `save_tensors`, for a checkpoint."""
        return {
            "random": random_states(self._device),
            **self.step_rate.state_dict(),
            "mismatch": self._mismatch.state_dict(),
            "warning": self.health.state_dict(),
            "method": self._gradient.state_dict(),
            "replay": None if self._replay is None else self._replay.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; settings are those of this run's spec."""
        self.load_shared_state({**state, "replay": None} if "replay" in state else state)
        if self._replay is not None and state["replay"] is not None:
            self._replay.load_state_dict(state["replay"])

    @on_every_rank
    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what every rank has of a `state_dict`: all but the stored responses."""
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise ValueError(f"state lacks {sorted(missing)}: give what state_dict returned")
        restore_random_states(state["random"], self._device)
        self.step_rate.load_state_dict(state)
        self._mismatch.load_state_dict(state["mismatch"])
        self.health.load_state_dict(state["warning"])
        self._gradient.load_state_dict(state["method"])

    def _accumulate(self, groups: Groups, policy_version: int, times: UpdateTimes) -> BatchGradient:
        started_s = self._clock()
        lengths = [each.num_sampled_tokens for each in chain.from_iterable(groups)]
        expected_weight = on_policy_weight(lengths, self._algorithm, self._mismatch.calibration)
        return self._gradient.compute(groups, policy_version, expected_weight, times, started_s)

    def _decide(self, batch: BatchGradient, limits: StepLimits) -> StepDecision:
        unit = batch_ess_unit(batch.summary, self._algorithm, self._mismatch.calibration)
        return decide_step(
            unit,
            batch_moments(batch.summary, batch.record.log_ratios, unit),
            limits,
            relative_error=self._mismatch.calibration.relative_error,
            kl_per_token=batch.sums.kl_per_token,
        )

    def _take_or_skip(
        self, pending: PendingStep, batch: BatchGradient, decision: StepDecision
    ) -> UpdateResult:
        """Take the decided step, or skip it, and return what it did."""
        self._is_stepping = True
        gradient_norm = clip_gradient(self._model.parameters(), self._max_gradient_norm)
        finite_norm = gradient_norm if math.isfinite(gradient_norm) else 0.0
        rewards, backoff = rewards_by_worker(pending.trajectories), self.health.backoff
        limits = self.health.rewards.limits
        self.health.observe(decision, batch, gradient_norm=finite_norm, rewards=rewards)
        skipped = _skip_reason(decision.verdict, gradient_norm)
        taken = None if skipped else decision.verdict
        rate = self._descend(pending, decision.reading, taken, backoff)
        result = self._result(
            pending.trajectories,
            reward_limits=limits,
            log_weights=tuple(batch.summary.log_weights),
            importance_weight_max=clamped_exp(max(batch.summary.log_weights)),
            ess_ratio=decision.reading.ess_ratio,
            on_policy_ess_ratio=decision.reading.on_policy_ess_ratio,
            ess_kind=decision.reading.kind,
            diagnostics=diagnostics(batch, self._algorithm.loss_config, finite_norm),
            ess_by_lag=ess_by_lag(pending.trajectories, batch.record, pending.policy_version),
            baseline_shift=-fmean(batch.advantages),
            masked_share=batch.masked_share,
            gradient_norm=finite_norm,
            **rate_fields(rate),
            skipped=skipped,
        )
        self._is_stepping = False
        return result

    def _descend(
        self,
        pending: PendingStep,
        reading: EssReading,
        verdict: StepVerdict | None,
        backoff: RateBackoff,
    ) -> EffectiveRate:
        """Take the step with the clipped gradient, or skip it.

        verdict: None if it is skipped.
        backoff: that the steps before have left.

        Returns the rate, with scale and rate 0 if it is skipped.
        """
        version = pending.policy_version
        base = self.step_rate.base(steps_taken=version)
        lags = tokens_by_lag(pending.trajectories, version)
        self.step_rate.observe(reading, lags, len(pending.trajectories))
        allowed = self.step_rate.allowed_rate(base)
        scale, rate = 0.0, 0.0
        if verdict is not None:
            scale = verdict.scale * (allowed / base if base > 0.0 else 1.0)
            slowed = base * backoff.factor
            rate = slowed * scale
            self._optimizer.step(slowed, scale)
        self.step_rate.take(None if verdict is None else rate, allowed)
        self._optimizer.zero_grad()
        return EffectiveRate(
            rate=rate, schedule=self.step_rate.schedule(base), scale=scale, backoff=backoff.factor
        )

    def _refuse(
        self, trajectories: Sequence[Trajectory], error: NonFiniteWeightError
    ) -> UpdateResult:
        self._optimizer.zero_grad()
        self.step_rate.take(None)
        limits, backoff = self.health.rewards.limits, self.health.backoff
        self.health.observe_refusal(rewards_by_worker(trajectories))
        lengths = [trajectory.num_sampled_tokens for trajectory in trajectories]
        return self._result(
            trajectories,
            reward_limits=limits,
            on_policy_ess_ratio=on_policy_ess_ratio(
                lengths, self._algorithm, self._mismatch.calibration
            ),
            learning_rate_backoff=backoff.factor,
            skipped=SkipReason.NON_FINITE_WEIGHT,
            skip_detail=str(error),
        )

    def _result(self, trajectories: Sequence[Trajectory], **found: Any) -> UpdateResult:
        """Return what was found, and what every result says; health has observed the step."""
        return UpdateResult(
            reward_mean=fmean(one.reward for one in trajectories),
            response_tokens_mean=fmean(one.num_sampled_tokens for one in trajectories),
            surprisal_nats=mean_surprisal(trajectories),
            calibration_age_steps=self._mismatch.calibration_age_steps,
            warning_level=self.health.level,
            warning_score=self.health.score,
            **self.health.window_fields(),
            **found,
        )


def _skip_reason(verdict: StepVerdict, gradient_norm: float) -> SkipReason | None:
    if not math.isfinite(gradient_norm):
        return SkipReason.NON_FINITE_GRADIENT
    if verdict.refusal is RefusalReason.LOW_ESS:
        return SkipReason(verdict.refusal)
    return SkipReason.NO_GRADIENT if gradient_norm == 0.0 else None
