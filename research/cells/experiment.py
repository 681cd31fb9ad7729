"""One cell: the learner's update and the engine's decoding in lockstep, with an exact lag.

    step s:   sample a batch with version max(0, s - k)   ->   update version s to s + 1

Version n is the parameters after n steps. The last k + 1 versions are kept, and the oldest of them
samples. So every batch is exactly k versions old from step k on. In a run with the same settings
the lag depends on timing. With `Ages` the data of a batch is up to k versions old. Where the
sampler's numbers are not the learner's, a group of the newest version is sampled beside each batch,
to calibrate with.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from transformers.utils.logging import disable_progress_bar

from research.cells.cell import Cell
from research.cells.records import DIGITS, CellRecord, EvaluationRow, StepColumns
from research.cells.sampling import CPU, Sampler, TaskPrompt, relay
from research.cells.versions import Versions, drawn_ages, policy_tensors
from vcpo.algo.ess.trust_region import TrustRegion
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.model.loading import hold_base_short, load_policy, pad_token_id
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.update.result import UpdateResult
from vcpo_rollout.engines.engine import NonFiniteLogitsError
from vcpo_rollout.environments import Split, make_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRegion(TrustRegion):
    """A control of studies: a trust region until a step, and then the rate that it allowed to it.

    If a run does as well with it, the region calibrates a constant rate and controls nothing.
    """

    held_at_step: int
    """The last step that the region looks at, at least 1."""
    steps: int = 0
    """Steps of the run so far, the skipped ones too."""

    @classmethod
    def of(cls, region: TrustRegion, held_at_step: int) -> Self:
        observed = {each.name: getattr(region, each.name) for each in fields(TrustRegion)}
        return cls(held_at_step=held_at_step, **observed)

    def observe(self, *batch: Any, **more: Any) -> Self:
        """Return the region after one more batch; a held one has not looked."""
        if self._is_held:
            return self
        # With slots the decorator makes another class, of which `super()` does not know.
        return TrustRegion.observe(self, *batch, **more)

    def largest_rate(self, base_rate: float) -> float:
        """Return the rate that is allowed to the next step, in [0, base_rate]."""
        if self._is_held and self.bound is not None:
            return min(base_rate, self.bound)
        return TrustRegion.largest_rate(self, base_rate)

    def step(self, rate: float, bound: float | None = None) -> Self:
        return replace(TrustRegion.step(self, rate, bound), steps=self.steps + 1)

    @property
    def _is_held(self) -> bool:
        return self.steps >= self.held_at_step


def run_cell(cell: Cell, model_name: str, device: torch.device = CPU) -> CellRecord:
    """Train and evaluate one cell in this thread.

    model_name: directory or hub name of the cell's model. device: has learner and sampler.
    Raises: ValueError when the model or the environment cannot be loaded; NonFiniteLogitsError as
    `Experiment.run`.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call] # the library does not type it
    started_s = time.process_time()
    experiment = Experiment(cell, model_name, device=device)
    updates, evaluations = experiment.run()
    return CellRecord(
        method=cell.method,
        lag=cell.lag,
        learning_rate=cell.learning_rate,
        seed=cell.seed,
        cpu_s=round(time.process_time() - started_s, 2),
        steps=step_columns(updates),
        evaluations=tuple(evaluations),
    )


def step_columns(updates: Sequence[UpdateResult]) -> StepColumns:
    """Return what a record keeps of a cell's updates, the first of which is step 1."""
    ess_ratios = [each.diagnostics.get("ess_ratio") for each in updates]
    ess = [
        None if ratio is None else ratio * len(each.log_weights)
        for ratio, each in zip(ess_ratios, updates, strict=True)
    ]
    own = {name: tuple(getattr(each, name) for each in updates) for name in DIGITS if name != "ess"}
    return StepColumns(**own, ess=tuple(ess))


class Experiment:
    """A learner's update, a sampler, and the policy versions between them."""

    def __init__(self, cell: Cell, model_name: str, *, device: torch.device = CPU) -> None:
        """Load the cell's model."""
        self._spec = cell.spec
        self._lag = cell.lag
        self._ages = cell.ages
        torch.manual_seed(cell.seed)
        settings = cell.spec.model
        self._model, tokenizer = load_policy(model_name, settings.revision, settings.lora)
        hold_base_short(self._model, cell.spec.learner.number_format)
        self._model.to(device)  # type: ignore[arg-type] # transformers wraps torch's method
        pad = pad_token_id(tokenizer)
        self.update = PolicyUpdate(self._model, cell.spec, pad)
        rate = self.update.step_rate
        if cell.fixed_target and rate.region is not None:
            rate.region = replace(rate.region, sure_surprisal_nats=math.inf)
        if cell.hold_rate_at_step is not None and rate.region is not None:
            rate.region = HeldRegion.of(rate.region, cell.hold_rate_at_step)
        self._sampler = Sampler(cell.spec, model_name, tokenizer, pad, device)
        task = cell.spec.environment
        self._training_task = make_environment(task.name, task.parameters, cell.seed)
        self._held_out_task = make_environment(task.name, task.parameters, cell.evaluation_seed)
        held_out = self._held_out_task, Split.EVALUATION, range(cell.spec.evaluation.prompts)
        self._held_out_prompts = self._sampler.prompts(*held_out)
        self._versions = Versions(cell.lag)

    def run(self) -> tuple[list[UpdateResult], list[EvaluationRow]]:
        """Take every step; evaluate at the start, at regular steps, and at the end.

        Training that breaks the policy ends there, and the evaluations that are left count as 0:
        a study must not lose the cells of the least stable method.

        Raises: NonFiniteLogitsError when the policy's logits are not finite before the first step.
        """
        last = self._spec.steps
        evaluated = [*range(0, last, self._spec.evaluation.every_steps), last]
        updates: list[UpdateResult] = []
        evaluations: list[EvaluationRow] = []
        try:
            for version in range(last + 1):
                self.publish()
                if version in evaluated:
                    evaluations.append(self.evaluate(version))
                if version < last:
                    updates.append(self.step(version, self.sample(version)))
        except NonFiniteLogitsError:
            if not updates:
                raise
            left = evaluated[len(evaluations) :]
            evaluations += [EvaluationRow(step=step, accuracy=0.0) for step in left]
        return updates, evaluations

    def publish(self) -> None:
        self._versions.add(policy_tensors(self._model))

    def sample(self, version: int) -> list[list[Trajectory]]:
        """Return the groups that the next step trains on; version: the newest one."""
        prompts = self._prompts(version)
        ages = drawn_ages(
            self._ages, self._lag, seed=self._spec.seed, step=version, num_groups=len(prompts)
        )
        groups: dict[int, list[Trajectory]] = {}
        for age in sorted(set(ages), reverse=True):
            places = [place for place, each in enumerate(ages) if each == age]
            sampled = self._sample_at(age, [prompts[place] for place in places])
            groups |= zip(places, sampled, strict=True)
        return [groups[place] for place in range(len(prompts))]

    def _prompts(self, version: int) -> list[TaskPrompt]:
        number = self._spec.batch.prompts_per_step
        indices = range(version * number, (version + 1) * number)
        return self._sampler.prompts(self._training_task, Split.TRAIN, indices)

    def _sample_at(self, age: int, prompts: Sequence[TaskPrompt]) -> list[list[Trajectory]]:
        """Return a group for each prompt, sampled from a version of this age on."""
        first, *later = self._versions.since(age)
        self._sampler.use(first)
        return self._sampler.groups(
            self._training_task,
            prompts,
            samples=self._spec.batch.trajectories_per_prompt,
            temperature=self._spec.sampling.temperature,
            later=relay(self._ages, later),
        )

    def step(self, version: int, groups: list[list[Trajectory]]) -> UpdateResult:
        """Take one step from a version, which is the newest one."""
        newest: list[Trajectory] = []
        if self._sampler.is_inexact:
            (newest,) = self._sample_at(0, self._prompts(version + 1)[:1])
        self.update.begin(self.update.draw(groups), policy_version=version)
        return self.update.finish(newest)

    def evaluate(self, version: int) -> EvaluationRow:
        """Return the accuracy of a version, which is the newest one."""
        self._sampler.use(self._versions.newest)
        settings = self._spec.evaluation
        groups = self._sampler.groups(
            self._held_out_task,
            self._held_out_prompts,
            samples=settings.samples_per_prompt,
            temperature=settings.temperature,
        )
        rewards = [each.reward for group in groups for each in group]
        return EvaluationRow(step=version, accuracy=sum(rewards) / len(rewards))
