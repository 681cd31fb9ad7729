"""TRL's trainer with the method `vcpo2`: `VCPOTrainer` in place of `trl.GRPOTrainer`.

Data, generation, rewards, logging and checkpoints are TRL's. Two things are the method's: the
gradient of a step, whose baseline weighs rewards by gradient norms, and the rate at which the
optimizer takes it; checkpoints hold what that depends on. docs/library.md says when TRL's data is
off-policy. It takes the extra `trl`.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from trl import GRPOTrainer
from trl.trainer.utils import selective_log_softmax

from vcpo.api.learner import ActivationCheckpointing
from vcpo.torch import StepRule, truncated_weights, vcpo2_advantages
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.per_sample_gradients.backward import MeasuredGradients, measure_gradients
from vcpo_learner.per_sample_gradients.slot_sums import ParameterSums
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import record_calls
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum


class VCPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL publishes no types
    """`GRPOTrainer` with the advantages and rates of `vcpo2`; its arguments are the same.

    Options that shape GRPO's loss are ignored: `loss_type`, `epsilon`, `scale_rewards`, ...

    Raises: ValueError naming an argument that the method has no place for.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        _require_supported(self)
        if self.args.gradient_checkpointing:  # the library's own would drop what norms need
            set_checkpoints(self.model, ActivationCheckpointing.LAYERS)
            self.args.gradient_checkpointing = False
        self._slots = Slots(self.model)
        self._rewards = torch.empty(0)
        self._step_gradient: _StepGradient | None = None
        self.add_callback(_StepRates(self))

    def _calculate_rewards(self, *arguments: Any, **keywords: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*arguments, **keywords)
        self._rewards = (rewards * self.reward_weights.to(rewards)).nansum(dim=1)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        steps = torch.full_like(self._rewards, self.state.global_step)
        return output | {"rewards": self._rewards, "generated_at_step": steps}

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Add a part of a step's batch to its gradient, which the last part completes."""
        model.train()
        batch = self._prepare_inputs(inputs)
        if self._step_gradient is None:
            self._step_gradient = _StepGradient(self)
        loss = self._step_gradient.add(model, batch)
        self._step += 1
        return loss

    def taken(self) -> tuple[Tensor, Tensor, float]:
        """Return log weights and lags, [B] each, and mean surprisal of a batch with a gradient."""
        assert self._step_gradient is not None  # the optimizer steps after a batch
        gradient, self._step_gradient = self._step_gradient, None
        surprisal_nats = float(torch.cat(gradient.surprisals).mean())
        return torch.cat(gradient.log_weights), torch.cat(gradient.lags), surprisal_nats

    def log_step(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self._metrics["train"][f"vcpo/{name}"].append(number)


class _StepGradient:
    """The gradient of one step, -sum_i A_i w_i grad(mean log pi_i) / B, from its micro-batches.

    A_i = R_i - b, and b takes the norms of all. So each pass adds up gradients weighted by their
    rewards and by 1, and the last one subtracts.
    """

    def __init__(self, trainer: VCPOTrainer) -> None:
        self._trainer = trainer
        self._num_parts: int = trainer.current_gradient_accumulation_steps
        self._sums = ParameterSums(trainer._slots, 1, keeps_factors=self._num_parts == 1)
        self._rewards: list[Tensor] = []
        self._squared_norms: list[Tensor] = []
        self._terms: list[Tensor] = []
        self.log_weights: list[Tensor] = []
        self.lags: list[Tensor] = []
        self.surprisals: list[Tensor] = []

    def add(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Add a micro-batch; return the step's loss with the last one, and 0 before."""
        trainer = self._trainer
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        with record_calls(trainer._slots) as recording, trainer.compute_loss_context_manager():
            logprobs = _logprobs(model, batch, trainer.temperature)
        sampled = batch.get("sampling_per_token_logps", batch.get("old_per_token_logps"))
        ratios = torch.zeros_like(logprobs) if sampled is None else logprobs.detach() - sampled
        # What is no part of a response may be NaN; a NaN in one raises where its weight is read.
        log_weights = ratios.masked_fill(mask == 0, 0.0).sum(dim=1)
        means = (logprobs * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        terms = truncated_weights(log_weights) * means
        self._rewards.append(batch["rewards"])
        reference = self._rewards[0].mean()  # offsets around 0 lose fewer digits
        num_trajectories = len(terms) * self._num_parts
        offsets = (reference - batch["rewards"]).double() / num_trajectories
        weighted = WeightedSum(offsets=offsets, groups=[0] * len(terms), sums=self._sums)
        measured = measure_gradients(terms, recording, weighted)
        self._squared_norms.append(measured.squared_norms)
        self._terms.append(terms.detach())
        self.log_weights.append(log_weights)
        behavior = logprobs.detach() if sampled is None else sampled
        self.surprisals.append(-behavior[mask != 0])
        self.lags.append(trainer.state.global_step - batch["generated_at_step"])
        if not trainer.accelerator.sync_gradients:
            return terms.new_zeros(())
        return self._complete(measured, reference)

    def _complete(self, measured: MeasuredGradients, reference: Tensor) -> Tensor:
        rewards, norms = torch.cat(self._rewards), torch.cat(self._squared_norms)
        advantages = vcpo2_advantages(rewards[None], norms[None], torch.cat(self.log_weights))[0]
        baseline = rewards[0] - advantages[0]  # one for the batch
        measured.add_to_parameters([float(baseline - reference) / len(rewards)])
        return -(advantages * torch.cat(self._terms)).mean()


class _StepRates(TrainerCallback, ExportableState):
    """Has the optimizer take each step at the rate that its batch allows."""

    def __init__(self, trainer: VCPOTrainer) -> None:
        self._trainer = trainer
        self._rule: StepRule | None = None
        self._rates = ExitStack()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if self._rule is None:
            self._rule = StepRule(keywords["optimizer"], max_lag_steps=_largest_lag(args))
            if saved := state.stateful_callbacks.get(type(self).__name__):
                self._rule.load_state_dict(saved)
        report = self._rates.enter_context(self._rule.rates(*self._trainer.taken()))
        self._trainer.log_step(ess_ratio=report.ess_ratio, rate=report.rate)

    def state(self) -> dict[str, Any]:
        """Return what `trainer_state.json` of a checkpoint keeps; empty before the first step."""
        return {} if self._rule is None else self._rule.state_dict()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self._rates.close()


def _logprobs(model: nn.Module, batch: dict[str, Tensor], temperature: float) -> Tensor:
    """Return the log-probability of each token of the completions, [B, T]."""
    completions = batch["completion_ids"]
    tokens = torch.cat([batch["prompt_ids"], completions], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = model(input_ids=tokens, attention_mask=mask).logits
    found: Tensor = selective_log_softmax(
        logits[:, -completions.shape[1] - 1 : -1].float() / temperature, completions
    )
    return found


def _largest_lag(args: Any) -> int:
    return int(
        (args.steps_per_generation * args.num_iterations - 1) // args.gradient_accumulation_steps
    )


def _require_supported(trainer: VCPOTrainer) -> None:
    args = trainer.args
    if args.beta:
        raise ValueError(f"beta is {args.beta}: the method has no KL penalty; give 0.0")
    if args.fp16:
        raise ValueError("fp16 is True: gradients that a scaler scales have other norms; give bf16")
    if trainer.accelerator.num_processes > 1:
        raise ValueError(
            f"{trainer.accelerator.num_processes} processes: baseline and rate are of a whole"
            " batch, which VCPOTrainer has in one process; `vcpo run` trains on several GPUs"
        )
    if trainer._is_vlm:
        raise ValueError("model: takes images, which VCPOTrainer does not score; give a text model")
