r"""One update: from groups of trajectories with rewards to one optimizer step.

The gradient of the step is linear in the gradients of the tokens' log-probabilities,

    sum_{i,t} k_it grad log pi(y_it),    k_it = -A_it a_it g_it,        lr = base_lr * scale(ESS),

with advantage A, weight a and clip factor g of the method (`vcpo_learner.estimator.loss`). For
VCPO, A_i = R_i - b, a_it = min(w_i, 8) / (B T_i), g = 1. The stages, and where they are:

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
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from vcpo.algo import (
    MIN_FRESH_BLOCKS,
    EssReading,
    NonFiniteWeightError,
    RateBackoff,
    RefusalReason,
    StepVerdict,
)
from vcpo.api import VCPORunSpec
from vcpo.api.algorithm import NORM_BASELINES, RowLayout
from vcpo.records.effective_rate import EffectiveRate
from vcpo.records.reasons import SkipReason
from vcpo.records.step_record import rate_fields
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.checkpoints.manifest import FileChecksum
from vcpo_learner.checkpoints.tensor_files import TensorFiles
from vcpo_learner.clock import Clock
from vcpo_learner.device import (
    computes,
    device_memory,
    random_states,
    restore_random_states,
)
from vcpo_learner.estimator.loss import trajectory_advantages
from vcpo_learner.estimator.own_functions import wants_norms
from vcpo_learner.estimator.trial import require_own_functions
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.forward.attention import take_calls
from vcpo_learner.forward.measurable_norms import require_measurable_norms
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.replayable import require_replayable
from vcpo_learner.optimizer.clipping import clip_gradient
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer
from vcpo_learner.optimizer.step_rate import StepRate
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.ranks.sharding import recover, release
from vcpo_learner.update.batch_decision import (
    StepDecision,
    batch_ess_unit,
    decide_step,
    on_policy_ess_ratio,
    on_policy_weight,
    split_groups,
)
from vcpo_learner.update.batch_statistics import (
    batch_moments,
    clamped_exp,
    diagnostics,
    ess_by_lag,
    mean_surprisal,
    response_tokens_mean,
    rewards_of,
    tokens_by_lag,
)
from vcpo_learner.update.fresh_tokens import FreshBlocks, fresh_blocks, wanted_fresh_tokens
from vcpo_learner.update.gradient import GradientAccumulation, Groups
from vcpo_learner.update.mismatch_judge import MismatchJudge
from vcpo_learner.update.pending_step import BatchGradient, PendingStep
from vcpo_learner.update.replay import replay_buffer
from vcpo_learner.update.result import UpdateResult, UpdateTimes
from vcpo_learner.update.run_health import RunHealth
from vcpo_learner.update.token_statistics import token_sums


class PolicyUpdate:
    """Trains a causal language model in place; owns its optimizer and its calibration.

    The model stays in evaluation mode: with dropout, learner and rollout workers would disagree
    about the policy. Owner: the tensor thread.

    Raises: StartError if the norms that the method needs cannot be measured with the model, if the
        optimizer's package is missing, or if a function of the user's own cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: VCPORunSpec,
        pad_token_id: int,
        clock: Clock = time.monotonic,
        ranks: Ranks | None = None,
    ) -> None:
        """Take over a model; with several ranks, the `PolicyNetwork` that is cut over them."""
        self._clock = clock
        self._network = PolicyNetwork.of(model.eval())
        self._model = self._network.model
        self._algorithm = spec.algorithm
        self._max_gradient_norm = spec.optimizer.max_gradient_norm
        self._rate = StepRate(spec)
        require_own_functions(spec)
        set_checkpoints(self._model, spec.learner.activation_checkpointing)
        self._gradient = GradientAccumulation(self._network, spec, pad_token_id, ranks)
        if spec.algorithm.router_replay:
            require_replayable(self._network)
        baseline = spec.algorithm.loss_config.baseline
        if baseline in NORM_BASELINES or wants_norms(baseline):
            for context, is_half in self._gradient.runner.check_contexts():
                with context:
                    require_measurable_norms(
                        self._network,
                        spec.algorithm.gradient_norms,
                        packs=spec.batch.row_layout is RowLayout.PACKED,
                        one_row=self._gradient.has_one_row,
                        num_ranks=1 if ranks is None else ranks.size,
                        is_half=is_half,
                    )
        release(self._network)  # so that the optimizer sees the shards of all parameters
        self._optimizer = PolicyOptimizer(self._model, spec.optimizer)
        group = None if ranks is None else ranks.checkpoint_group
        self._files = TensorFiles(self._model, self._optimizer, group)
        self._mismatch = MismatchJudge(spec)
        self.health = RunHealth(spec)
        """Early warning after the steps so far."""
        self._replay = replay_buffer(spec)
        self._is_stepping = False
        """Stays True if a step fails after it began to change parameters or optimizer, or if the
        model cannot be used after an error."""

    @property
    def is_whole(self) -> bool:
        """Whether parameters and optimizer are of the same step, and their device computes."""
        return not self._is_stepping and computes(self._device)

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def step(self, groups: Groups, *, policy_version: int) -> UpdateResult:
        """Take one optimizer step on a batch, or skip it: `draw`, `begin` and `finish`."""
        return self.finish(self.begin(self.draw(groups), policy_version=policy_version))

    def draw(self, groups: Groups) -> Groups:
        """Return the groups to train on: those that arrived, or with replay, drawn responses."""
        return groups if self._replay is None else self._replay.exchange(groups)

    def begin(self, groups: Groups, *, policy_version: int) -> PendingStep:
        """Compute the gradient of a batch; the parameters' `.grad` hold it until `finish`.

        groups: [num_prompts][trajectories]; the trajectories of one prompt make one group.
        policy_version: of the model's parameters; tokens that it sampled calibrate the on-policy
            ESS ratio.
        Raises: ValueError for an empty batch or group, and as `batch_advantages`. A critic does not
            change then.
        """
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
        num_blocks = len(batch.fresh.num_tokens) if isinstance(batch, BatchGradient) else 0
        num_tokens = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
        return PendingStep(
            trajectories=trajectories,
            policy_version=policy_version,
            batch=batch,
            wanted_fresh_tokens=self._wanted_fresh_tokens(num_blocks, num_tokens),
            times=times,
        )

    def finish(self, pending: PendingStep, newest: Sequence[Trajectory] = ()) -> UpdateResult:
        """Decide the step and take it, or skip it and say why.

        newest: responses beside the batch with tokens of the pending step's version. They are
            scored before the step and calibrate; they do not change the gradient.
        """
        started_s = self._clock()
        fresh = self._fresh_blocks(newest, pending.policy_version)
        scored_s = self._clock()
        result = self._conclude(pending, fresh)
        times = pending.times.after(score_s=scored_s - started_s, step_s=self._clock() - scored_s)
        return replace(
            result, times=times, memory=device_memory(self._device), attention_calls=take_calls()
        )

    def _conclude(self, pending: PendingStep, fresh: FreshBlocks) -> UpdateResult:
        """Decide the step and take or skip it; fresh: of responses beside the batch."""
        batch = pending.batch
        if isinstance(batch, BatchGradient):
            fresh = batch.fresh.join(fresh)
        review = self._mismatch.observe(fresh)
        if isinstance(batch, NonFiniteWeightError):
            result = self._refuse(pending.trajectories, batch)
        else:
            try:
                result = self._take_or_skip(pending, batch, self._decide(batch))
            except NonFiniteWeightError as error:
                result = self._refuse(pending.trajectories, error)
        return replace(result, fresh=fresh.tokens, mismatch=review)

    def rehearse(self, group: Sequence[Trajectory], *, policy_version: int) -> None:
        """Compute the gradient of one group, and leave everything unchanged.

        Raises: what the computation raises.
        """
        before = deepcopy(self._gradient.state_dict())
        try:
            scored = self._gradient.score([group], policy_version)
            self._gradient.accumulate(scored, [1.0] * len(group))
        except NonFiniteWeightError:
            pass  # such a step is skipped; it does not fail
        except Exception:  # as in `begin`
            self._recover()
            raise
        finally:
            self._gradient.load_state_dict(before)
            self._optimizer.zero_grad()

    def _recover(self) -> None:
        """Make the model usable after an error in a pass, or the update is not whole any more."""
        self._is_stepping = True
        recover(self._network)
        self._is_stepping = False

    def forget(self, lease_ids: Collection[str]) -> dict[str, tuple[Trajectory, ...]]:
        """Discard the responses to these leases from replay; return them by lease."""
        return {} if self._replay is None else self._replay.remove(lease_ids)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of the tensors in a checkpoint, on all ranks together."""
        return self._files.size_bytes

    def save_tensors(self, folder: Path) -> Future[dict[str, FileChecksum]]:
        """Copy parameters and moments, and write the copies beside the next steps.

        Returns the checksums of the files by name.
        """
        return self._files.save(folder)

    def load_tensors(self, folder: Path) -> None:
        """Continue from the parameters and moments that `save_tensors` wrote.

        Raises: ValueError if they belong to another model.
        """
        self._files.load(folder)

    def close(self) -> None:
        """Wait for the save in flight."""
        self._files.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on beside `save_tensors`, for a checkpoint."""
        return {
            "random": random_states(self._device),
            **self._rate.state_dict(),
            "mismatch": self._mismatch.state_dict(),
            "warning": self.health.state_dict(),
            "method": self._gradient.state_dict(),
            "replay": None if self._replay is None else self._replay.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; settings are those of this run's spec.

        Raises: ValueError if the state has another form.
        """
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise ValueError(f"state lacks {sorted(missing)}: give what state_dict returned")
        restore_random_states(state["random"], self._device)
        self._rate.load_state_dict(state)
        self._mismatch.load_state_dict(state["mismatch"])
        self.health.load_state_dict(state["warning"])
        self._gradient.load_state_dict(state["method"])
        if self._replay is not None and state["replay"] is not None:
            self._replay.load_state_dict(state["replay"])

    def _accumulate(self, groups: Groups, policy_version: int, times: UpdateTimes) -> BatchGradient:
        """Compute the gradient of a batch, and the numbers that the decision needs."""
        started_s = self._clock()
        self._mismatch.measure_rounding(self._gradient.runner, groups)
        lengths = [each.num_sampled_tokens for each in chain.from_iterable(groups)]
        expected_weight = on_policy_weight(lengths, self._algorithm, self._mismatch.calibration)
        scored = self._gradient.score(groups, policy_version, expected_weight)
        scored_s = self._clock()
        summary, config = scored.summary, self._algorithm.loss_config
        advantages = trajectory_advantages(
            split_groups(summary.rewards, summary.group_sizes),
            split_groups(summary.squared_norms, summary.group_sizes),
            split_groups(summary.log_weights, summary.group_sizes),
            config,
            expected_weight,
            split_groups(summary.num_tokens, summary.group_sizes),
        )
        masked_share = self._gradient.accumulate(scored, advantages)
        if scored.is_accumulated:
            times.backward_s += self._clock() - started_s
        else:
            times.score_s += scored_s - started_s
            times.backward_s += self._clock() - scored_s
        log_ratios = scored.record.log_ratios
        return BatchGradient(
            record=scored.record,
            summary=summary,
            sums=token_sums(log_ratios, config.largest_weight),
            advantages=advantages,
            masked_share=masked_share,
            fresh=fresh_blocks(
                list(chain.from_iterable(groups)),
                log_ratios,
                policy_version,
                scored.record.rollout_logprobs,
            ),
        )

    def _wanted_fresh_tokens(self, num_blocks: int, batch_tokens: int) -> int:
        """Return the number of fresh tokens to score beside a batch with this many fresh blocks."""
        is_given = self._algorithm.on_policy_ess_ratio is not None
        # A ratio that is given needs no calibration, but workers are compared at every step.
        wanted = MIN_FRESH_BLOCKS if is_given else self._mismatch.calibration.wanted_count
        return wanted_fresh_tokens(wanted - num_blocks, batch_tokens)

    def _calibration_age_steps(self) -> int:
        is_given = self._algorithm.on_policy_ess_ratio is not None
        return 0 if is_given else self._mismatch.calibration.age_steps

    def _fresh_blocks(self, trajectories: Sequence[Trajectory], policy_version: int) -> FreshBlocks:
        """Score trajectories beside the batch, and return their fresh tokens."""
        if not trajectories:
            return FreshBlocks()
        record = self._gradient.score_only(trajectories, policy_version)
        return fresh_blocks(
            trajectories, record.log_ratios, policy_version, record.rollout_logprobs
        )

    def _decide(self, batch: BatchGradient) -> StepDecision:
        unit = batch_ess_unit(batch.summary, self._algorithm, self._mismatch.calibration)
        return decide_step(
            unit,
            batch_moments(batch.summary, batch.record.log_ratios, unit),
            self._algorithm,
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
        rewards, backoff = rewards_of(pending.trajectories), self.health.backoff
        limits = self.health.rewards.limits
        self.health.observe(decision, batch, gradient_norm=finite_norm, rewards=rewards)
        skipped = _skip_reason(decision.verdict, gradient_norm)
        if skipped is None and self.health.skips:
            skipped = SkipReason.EARLY_WARNING
        taken = None if skipped else decision.verdict
        rate = self._descend(pending, decision.reading, taken, backoff)
        result = UpdateResult(
            reward_mean=fmean(rewards),
            reward_limits=limits,
            **self.health.window_fields(),
            response_tokens_mean=response_tokens_mean(pending.trajectories),
            surprisal_nats=mean_surprisal(pending.trajectories),
            log_weights=tuple(batch.summary.log_weights),
            importance_weight_max=clamped_exp(max(batch.summary.log_weights)),
            ess_ratio=decision.reading.ess_ratio,
            on_policy_ess_ratio=decision.reading.on_policy_ess_ratio,
            ess_kind=decision.reading.kind,
            diagnostics=diagnostics(batch, self._algorithm.loss_config),
            calibration_age_steps=self._calibration_age_steps(),
            ess_by_lag=ess_by_lag(pending.trajectories, batch.record, pending.policy_version),
            warning_level=self.health.level,
            warning_score=self.health.score,
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
        base = self._rate.base(steps_taken=version)
        self._rate.observe(reading, tokens_by_lag(pending.trajectories, version))
        allowed = self._rate.allowed(base)
        scale, rate = 0.0, 0.0
        if verdict is not None:
            scale = verdict.scale * (allowed / base if base > 0.0 else 1.0)
            slowed = base * backoff.factor
            rate = slowed * scale
            self._optimizer.step(slowed, scale)
        self._rate.take(None if verdict is None else rate, allowed)
        self._optimizer.zero_grad()
        return EffectiveRate(
            rate=rate, schedule=self._rate.schedule(base), scale=scale, backoff=backoff.factor
        )

    def _refuse(
        self,
        trajectories: Sequence[Trajectory],
        error: NonFiniteWeightError,
    ) -> UpdateResult:
        self._optimizer.zero_grad()
        self._rate.take(None)
        rewards, limits = rewards_of(trajectories), self.health.rewards.limits
        backoff = self.health.backoff
        self.health.observe_refusal(rewards)
        lengths = [trajectory.num_sampled_tokens for trajectory in trajectories]
        return UpdateResult(
            reward_mean=fmean(rewards),
            reward_limits=limits,
            **self.health.window_fields(),
            response_tokens_mean=response_tokens_mean(trajectories),
            surprisal_nats=mean_surprisal(trajectories),
            on_policy_ess_ratio=on_policy_ess_ratio(
                lengths, self._algorithm, self._mismatch.calibration
            ),
            calibration_age_steps=self._calibration_age_steps(),
            warning_level=self.health.level,
            warning_score=self.health.score,
            learning_rate_backoff=backoff.factor,
            skipped=SkipReason.NON_FINITE_WEIGHT,
            skip_detail=str(error),
        )


def _skip_reason(verdict: StepVerdict, gradient_norm: float) -> SkipReason | None:
    if not math.isfinite(gradient_norm):
        return SkipReason.NON_FINITE_GRADIENT
    match verdict.refusal:
        case RefusalReason.LOW_ESS:
            return SkipReason.LOW_ESS
        case RefusalReason.HIGH_DIVERGENCE:
            return SkipReason.HIGH_DIVERGENCE
    return SkipReason.NO_GRADIENT if gradient_norm == 0.0 else None
