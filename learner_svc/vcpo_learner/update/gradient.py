"""The gradient of a batch: in one pass over it, or scored first and then accumulated.

The step's gradient is sum_{i,t} k_it grad log pi(y_it), with the k_it of `vcpo_learner.estimator`.

    one pass    if k_it = c_i a_it, with a_it the trajectory's own weights, and c_i = -(R_i - b)
                with one number b for those that share a baseline: the backward pass measures the
                norms for b, and b completes the gradient with the last micro-batch of those that
                share it. Also if k_it needs no more than rewards and its own trajectory.
    two passes  otherwise: score the batch, compute all k_it, run backward. If one micro-batch holds
                everything, its graph is kept and the second pass needs no forward pass.

Both give the same numbers where both are possible.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.algo.advantage import BaselineScope
from vcpo.algo.health.fresh_tokens import FreshBlock
from vcpo.algo.methods import Clipping
from vcpo.api import VCPORunSpec
from vcpo.api.algorithm import RowLayout
from vcpo.api.workloads import Precision
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.clock import Clock
from vcpo_learner.device import to_device
from vcpo_learner.estimator.clipping import token_weights
from vcpo_learner.estimator.loss import (
    regularized_rewards,
    shaped_rewards,
    surrogate_coefficients,
    token_coefficients,
    trajectory_advantages,
)
from vcpo_learner.estimator.own_functions import wants_norms
from vcpo_learner.estimator.record import BatchRecord, batch_record, token_lags
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.forward.attention import has_kernel, take_calls, transformers_model
from vcpo_learner.forward.fused_layers import fuse_layers
from vcpo_learner.forward.measurable_norms import require_measurable_norms
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.token_batch import BatchTokens, batch_tokens
from vcpo_learner.per_sample_gradients.slot_sums import ParameterSums, SlotSums
from vcpo_learner.per_sample_gradients.taps import require_gradients
from vcpo_learner.ranks.commands import Groups
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.ranks.sharded_sums import ShardedGradient
from vcpo_learner.ranks.sharding import release
from vcpo_learner.schedule.token_budget import budget_on_ranks
from vcpo_learner.update.batch_decision import (
    may_have_advantage,
    split_groups,
    token_sums,
)
from vcpo_learner.update.fresh_tokens import fresh_blocks
from vcpo_learner.update.micro_batches import (
    GroupMicroStep,
    MicroBatchRunner,
    OpenGroups,
    backward,
    mesh_place,
)
from vcpo_learner.update.result import BatchGradient, BatchSummary, Graph, ScoredBatch, UpdateTimes
from vcpo_learner.update.token_inputs import TokenInputs

_logger = logging.getLogger(__name__)


class GradientAccumulation:
    """Computes the gradient of batches under the run's loss, into the parameters' `.grad`.

    Owner: the update.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: VCPORunSpec,
        pad_token_id: int,
        ranks: Ranks | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._config = spec.algorithm.loss_config
        self._longest_response = spec.sampling.max_new_tokens
        self._ranks = ranks or Ranks(device=next(model.parameters()).device)
        self.measures_norms = wants_norms(self._config.baseline)
        policy = PolicyNetwork.of(model).model
        fuse_layers(policy, is_half=spec.learner.number_format is Precision.BFLOAT16)
        memory = budget_on_ranks(policy, spec, self._ranks, measures_norms=self.measures_norms)
        setting = spec.learner.activation_checkpointing
        set_checkpoints(policy, setting if memory is None else memory.activations)
        self._spans_batch = self._config.baseline_scope is BaselineScope.BATCH
        # Trajectories that share a baseline are in one replica, or in all if the batch shares one.
        place = mesh_place(self._ranks)
        self.runner = MicroBatchRunner(
            model, spec, pad_token_id, place.of_one_replica if self._spans_batch else place, memory
        )
        self._share_in_group = (
            self._ranks.share if self._spans_batch else self._ranks.share_in_replica
        )
        self._inputs = TokenInputs(self._config, self.runner, self._ranks)
        self._fits_one_pass = spec.algorithm.fits_one_pass and spec.learner.prefers_one_pass(
            sums_groups=self.measures_norms
        )
        self._sharded: ShardedGradient | None = None
        if self._ranks.communication is not None:
            release(self.runner.network)
            self._sharded = ShardedGradient(self.runner.slots, self._ranks.communication)

    def score(
        self, groups: Groups, policy_version: int, on_policy_weight: float = 1.0
    ) -> ScoredBatch:
        """Score a batch, and accumulate its gradient already if one pass is enough.

        on_policy_weight: mean truncated weight that the batch would have on policy, in (0, 1].

        Raises: NonFiniteWeightError if a weight or a norm is not a number.
        """
        trajectories = list(chain.from_iterable(groups))
        tokens = batch_tokens(trajectories, self.runner.device, self._ranks)
        record = self._empty_record(trajectories, policy_version)
        shaped = shaped_rewards(record, self._config)
        rewards: list[float] = shaped.tolist()
        sizes = [len(group) for group in groups]
        shared = [len(trajectories)] if self._spans_batch else sizes
        flags = may_have_advantage(split_groups(rewards, sizes), self._config)
        graph = None
        members = split_groups(range(len(trajectories)), shared)
        # Sums beside norms stay open over several micro-steps; others are one backward pass.
        is_one_pass = self._config.is_separable or (
            self._fits_one_pass and (self.measures_norms or self.runner.holds_each(tokens, members))
        )
        if self._config.is_separable:
            norms = [0.0] * len(trajectories)
            self._accumulate_separable(record, tokens, split_groups(rewards, sizes), flags)
        elif is_one_pass:
            norms = self._accumulate_groups(
                record, tokens, shaped, flags, members, on_policy_weight
            )
        else:
            norms, graph = self._score(record, tokens, flags)
        self._ranks.share(record.learner_logprobs)
        if not is_one_pass:
            record = self._inputs.add_to(record, tokens, rewards)
            rewards = regularized_rewards(shaped, record, self._config).tolist()
        return ScoredBatch(
            record=record,
            tokens=tokens,
            summary=BatchSummary(
                group_sizes=sizes,
                num_tokens=record.num_tokens,
                rewards=rewards,
                log_weights=record.log_weights().tolist(),
                squared_norms=norms,
            ),
            is_accumulated=is_one_pass,
            graph=graph,
        )

    def compute(
        self,
        groups: Groups,
        policy_version: int,
        on_policy_weight: float,
        times: UpdateTimes,
        started_s: float,
    ) -> BatchGradient:
        """Compute the gradient of a batch, and the numbers that the decision needs; as `score`.

        times: is given the time since `started_s`, of the update's clock.
        """
        scored = self.score(groups, policy_version, on_policy_weight)
        scored_s, summary = self._clock(), scored.summary
        advantages = trajectory_advantages(
            split_groups(summary.rewards, summary.group_sizes),
            split_groups(summary.squared_norms, summary.group_sizes),
            split_groups(summary.log_weights, summary.group_sizes),
            self._config,
            on_policy_weight,
            split_groups(summary.num_tokens, summary.group_sizes),
        )
        masked_share = self.accumulate(scored, advantages)
        if scored.is_accumulated:
            times.backward_s += self._clock() - started_s
        else:
            times.score_s += scored_s - started_s
            times.backward_s += self._clock() - scored_s
        return BatchGradient(
            record=scored.record,
            summary=summary,
            sums=token_sums(scored.record.log_ratios),
            advantages=advantages,
            masked_share=masked_share,
            fresh=_fresh(list(chain.from_iterable(groups)), scored.record, policy_version),
        )

    def accumulate(self, batch: ScoredBatch, advantages_of_batch: Sequence[float]) -> float:
        """Complete the gradient; return the share of tokens whose clip factor is 0.

        Raises: NonFiniteWeightError if a coefficient is not a number.
        """
        if batch.is_accumulated and not self._config.is_separable:
            return 0.0
        record, graph = batch.record, batch.graph
        found = token_coefficients(record, advantages_of_batch, self._config)
        if batch.is_accumulated:
            return found.masked_share
        if graph is not None:
            weights = record.select(found.values, graph.positions)
            backward(graph.logprobs, graph.batch.place_trained(weights))
            return found.masked_share
        counts: list[float] = record.sums((found.values != 0.0).double()).tolist()
        used = [position for position, count in enumerate(counts) if count > 0.0]
        for step in self.runner.split(batch.tokens, used):
            weights = record.select(found.values, step.positions)
            backward(self.runner.logprobs(step.batch), step.place_trained(weights))
        return found.masked_share

    def score_only(self, trajectories: Sequence[Trajectory], policy_version: int) -> BatchRecord:
        """Return the record of trajectories beside the batch, scored without a gradient."""
        record = self._empty_record(trajectories, policy_version)
        tokens = batch_tokens(trajectories, self.runner.device, self._ranks)
        self._write_logprobs(record, tokens, range(len(trajectories)))
        self._ranks.share(record.learner_logprobs)
        release(self.runner.network)
        return record

    def score_fresh(
        self, trajectories: Sequence[Trajectory], policy_version: int
    ) -> tuple[FreshBlock, ...]:
        """Score trajectories beside the batch, and return their fresh tokens."""
        if not trajectories:
            return ()
        record = self.score_only(trajectories, policy_version)
        return _fresh(trajectories, record, policy_version)

    def state_dict(self) -> dict[str, Any]:
        return self._inputs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inputs.load_state_dict(state)

    def _empty_record(self, trajectories: Sequence[Trajectory], policy_version: int) -> BatchRecord:
        record = batch_record(
            trajectories,
            longest_response=self._longest_response,
            device=self.runner.device,
            dtype=self.runner.logprob_dtype,
        )
        self._ranks.blank(record.learner_logprobs)
        if self._config.clipping is not Clipping.PROXIMAL_CLIP and self._config.is_shipped:
            return record
        lags = to_device(token_lags(trajectories, policy_version), self.runner.device)
        return replace(record, lags=lags)

    def _write_logprobs(
        self, record: BatchRecord, tokens: BatchTokens, positions: Sequence[int]
    ) -> None:
        for step in self.runner.split(tokens, positions):
            with torch.no_grad():
                logprobs = self.runner.logprobs(step.batch)
            trained = step.select_trained(logprobs)
            record.write(record.learner_logprobs, step.positions, trained)

    def _score(
        self, record: BatchRecord, tokens: BatchTokens, flags: Sequence[bool]
    ) -> tuple[list[float], Graph | None]:
        """First of two passes; return norms [B], 0 where none were measured, and a graph if kept.

        flags: [B] trajectories that the second pass may use.
        """
        chosen = [position for position, flag in enumerate(flags) if flag]
        # The graph of a sharded model serves one backward pass.
        is_alone = self._ranks.size == 1
        keep_graph = is_alone and bool(chosen) and self.runner.fits_one(tokens, chosen)
        if not (self.measures_norms or keep_graph):
            chosen = []
        self._write_logprobs(record, tokens, sorted(set(range(len(flags))) - set(chosen)))
        norms = torch.zeros_like(record.rewards)
        graph = None
        for step in self.runner.split(tokens, chosen, whole=keep_graph):
            positions = step.positions
            with torch.enable_grad():
                forward = self.runner.forward(step.batch, measures_norms=self.measures_norms)
                logprobs = forward.logprobs
                trained = step.select_trained(logprobs.detach())
                record.write(record.learner_logprobs, positions, trained)
                if self.measures_norms:
                    weights = token_weights(record.part(positions), self._config)
                    measured = forward.measure(step.place_trained(weights), retain_graph=keep_graph)
                    norms[positions] = measured.squared_norms[: len(positions)]
            if keep_graph:
                graph = Graph(positions=positions, logprobs=logprobs, batch=step.batch)
        return self._ranks.share(norms).tolist(), graph

    def _accumulate_separable(
        self,
        record: BatchRecord,
        tokens: BatchTokens,
        rewards: Sequence[Sequence[float]],
        flags: Sequence[bool],
    ) -> None:
        """Both passes in one, for coefficients that need no more than rewards and one trajectory.

        rewards: [num_groups][n_g], shaped. flags: as for `_score`; what has none is scored only.
        """
        zeros = [[0.0] * len(own) for own in rewards]
        advantages = record.rewards.new_tensor(
            trajectory_advantages(rewards, zeros, zeros, self._config)
        )
        chosen = [position for position, flag in enumerate(flags) if flag]
        self._write_logprobs(record, tokens, sorted(set(range(len(flags))) - set(chosen)))
        for step in self.runner.split(tokens, chosen):
            positions = list(step.positions)
            logprobs = self.runner.logprobs(step.batch)
            trained = step.select_trained(logprobs.detach())
            record.write(record.learner_logprobs, positions, trained)
            part = record.part(positions)
            found = surrogate_coefficients(part, advantages[positions], self._config)
            backward(logprobs, step.place_trained(found.values))

    def _accumulate_groups(
        self,
        record: BatchRecord,
        tokens: BatchTokens,
        rewards: Tensor,
        flags: Sequence[bool],
        members: Sequence[Sequence[int]],
        on_policy_weight: float,
    ) -> list[float]:
        """Both passes in one; return norms [B], 0 where none were measured.

        members: [groups] positions of the trajectories that share a baseline. Groups without a flag
            are scored only: equal rewards cost no backward pass.
        on_policy_weight: as for `score`.
        """
        trained = [group for group in members if any(flags[at] for at in group)]
        idle = set(range(len(flags))) - set(chain.from_iterable(trained))
        self._write_logprobs(record, tokens, sorted(idle))
        norms = torch.zeros_like(record.rewards)
        opened: OpenGroups | None = None
        unused = set(self.runner.slots)
        squares, log_weights = torch.zeros_like(norms), torch.zeros_like(norms)
        for step in self.runner.split_groups(tokens, trained):
            positions = list(step.positions)
            forward = self.runner.forward(step.batch, measures_norms=self.measures_norms)
            logprobs = step.select_trained(forward.logprobs.detach())
            record.write(record.learner_logprobs, positions, logprobs)
            part = record.part(positions)
            weights = token_weights(part, self._config)
            squares[positions] = part.sums(weights.square())
            log_weights[positions] = part.sums(part.log_ratios)
            if opened is None:
                opened = self._open_groups(step, trained, rewards, squares, on_policy_weight)
            weighted_sum = opened.weighted_sum(step.members, weights)
            measured = forward.measure(step.place_trained(weights), weighted_sum)
            norms[positions] = measured.squared_norms[: len(positions)]
            if step.is_last:
                known = torch.stack([log_weights, norms])[:, list(opened.positions)]
                measured.add_to_parameters(opened.slopes(*self._share_in_group(known).tolist()))
                opened = None
            unused &= measured.unused
        release(self.runner.network)
        if trained and self.measures_norms:
            if self._sharded is not None:
                self._sharded.finish()
            require_gradients(self.runner.slots, unused)
        return self._ranks.share(norms).tolist()

    def _open_groups(
        self,
        step: GroupMicroStep,
        groups: Sequence[Sequence[int]],
        rewards: Tensor,
        squares: Tensor,
        on_policy_weight: float,
    ) -> OpenGroups:
        """Open the groups of a micro-step, which is the first that runs any of them.

        groups: positions of all trajectories that are trained on. squares: [B] sum_t a_it^2 of the
        trajectories that this rank ran. on_policy_weight: as for `score`.
        """
        members = [groups[number] for number in step.numbers]
        known = self._share_in_group(squares[list(chain.from_iterable(members))])
        return OpenGroups(
            members,
            rewards,
            known.tolist() if step.is_last else None,
            self._sums(step),
            self._config,
            on_policy_weight,
        )

    def _sums(self, step: GroupMicroStep) -> SlotSums:
        if self._sharded is not None:
            return self._sharded.sums(max(1, len(step.numbers)))  # an idle replica has none
        slots = self.runner.slots
        return ParameterSums(slots, len(step.numbers), keeps_factors=step.is_last)


def checked_gradient(
    network: PolicyNetwork,
    spec: VCPORunSpec,
    pad_token_id: int,
    ranks: Ranks | None = None,
    clock: Clock = time.monotonic,
) -> GradientAccumulation:
    """Return the accumulation of a run, after the checks of its model; rows as it wants them.

    Raises: StartError, naming the field and the fix.
    """
    if spec.batch.row_layout is RowLayout.AUTO:
        reason: object = "no kernel of this device takes packed ones"
        model = transformers_model(network)
        if model is not None and has_kernel(model):
            packed = spec.batch.model_copy(update={"row_layout": RowLayout.PACKED})
            changed = spec.model_copy(update={"batch": packed})
            before = model.config._attn_implementation
            take_calls()
            try:
                found = checked_gradient(network, changed, pad_token_id, ranks, clock)
                if "kernel" in take_calls():
                    _logger.info("spec.batch.rowLayout: auto, rows are packed")
                    return found
            except Exception as error:  # noqa: BLE001 - a model's own code and kernels run there
                reason = error
            model.set_attn_implementation(before)
        _logger.info("spec.batch.rowLayout: auto, rows are padded (%s)", reason)
    gradient = GradientAccumulation(network, spec, pad_token_id, ranks, clock)
    packs, num_ranks = gradient.runner.packs, 1 if ranks is None else ranks.size
    for context, is_half in gradient.runner.check_contexts() if gradient.measures_norms else ():
        with context:
            require_measurable_norms(network, packs=packs, num_ranks=num_ranks, is_half=is_half)
    return gradient


def _fresh(
    trajectories: Sequence[Trajectory], record: BatchRecord, policy_version: int
) -> tuple[FreshBlock, ...]:
    logprobs = record.rollout_logprobs
    return fresh_blocks(trajectories, record.log_ratios, policy_version, logprobs)
