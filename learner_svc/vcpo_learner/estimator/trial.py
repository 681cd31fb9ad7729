"""`python -m vcpo_learner.estimator.trial < run.yaml`: tries a run's own loss and baseline.

It calls them twice on a small batch, as the learner does before its first step. It ends with 0 and
the line `TRIED`, or with `CANNOT_START`; the message then follows the mark of start errors in the
log, and begins with the field.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.methods import LossConfig
from vcpo.api import VCPORunSpec, parse_run
from vcpo.service.lifecycle import CANNOT_START, TRIED, StartError, start_errors
from vcpo.service.logs import record_end
from vcpo.service.plugins import import_from_run_folder
from vcpo_learner.estimator.loss import token_coefficients, trajectory_advantages
from vcpo_learner.estimator.own_functions import BASELINE_FIELD, LOSS_FIELD
from vcpo_learner.estimator.record import BatchRecord, BatchSize

_GROUPS = ((3, 1, 4), (2, 5))
"""Trained tokens of the trajectories of each group."""
_REWARDS = ((1.0, 0.0, 0.5), (0.0, 1.0))
_SQUARED_NORMS = ((0.5, 2.0, 1.0), (1.0, 0.0))
_CALLS = 2


def main(look: Callable[[VCPORunSpec], Iterable[str] | None]) -> int:
    """Read a run from standard input, write the lines found of it, and return the exit status."""
    try:
        with start_errors():
            run = parse_run(sys.stdin.read(), source="standard input")
            import_from_run_folder(run)
        found = look(run.spec)
        sys.stdout.write("\n".join([*(found or ()), TRIED]))
    except StartError as error:
        record_end(str(error))
        return CANNOT_START
    return 0


def require_own_functions(spec: VCPORunSpec) -> None:
    """Call a run's own loss and baseline on a small batch; nothing happens to shipped ones."""
    config = spec.algorithm.loss_config
    if config.is_shipped:
        return
    with start_errors():
        record = small_record(spec)
        advantages = [_advantages(config, record) for _ in range(_CALLS)]
        if advantages[0] != advantages[1]:
            raise _differs(BASELINE_FIELD, str(config.baseline))
        found = [_coefficients(config, record, advantages[0]) for _ in range(_CALLS)]
        if not torch.equal(found[0], found[1]):
            raise _differs(LOSS_FIELD, config.loss)


def small_record(spec: VCPORunSpec) -> BatchRecord:
    """Return a batch of two groups, from 0 to 4 versions old, with all that a loss may read."""
    lengths = [length for group in _GROUPS for length in group]
    total = sum(lengths)
    generator = torch.Generator().manual_seed(spec.seed)
    rollout = -0.1 - torch.rand(total, generator=generator, dtype=torch.float64)
    drift = 0.3 * torch.randn(total, generator=generator, dtype=torch.float64)
    record = BatchRecord(
        trajectory_ids=[f"trial/{number}" for number in range(len(lengths))],
        num_tokens=lengths,
        rewards=torch.tensor(
            [reward for group in _REWARDS for reward in group], dtype=torch.float64
        ),
        rollout_logprobs=rollout,
        learner_logprobs=(rollout + drift).clamp(max=-0.01),
        size=BatchSize(
            trajectories=len(lengths), tokens=total, longest_response=spec.sampling.max_new_tokens
        ),
    )
    return replace(
        record,
        lags=torch.arange(total) % 5,
        entropies=torch.rand(total, generator=generator, dtype=torch.float64),
        reference_logprobs=rollout - 0.1,
        advantages=drift,
    )


def _advantages(config: LossConfig, record: BatchRecord) -> list[float]:
    log_weights = iter(record.log_weights().tolist())
    try:
        return trajectory_advantages(
            _REWARDS,
            _SQUARED_NORMS,
            [[next(log_weights) for _ in group] for group in _GROUPS],
            config,
            num_tokens=_GROUPS,
        )
    except NonFiniteWeightError as error:
        raise StartError(
            f"{BASELINE_FIELD}: {config.baseline!r} returned {error.value} for trajectory"
            f" {error.index}; advantages must be finite"
        ) from error


def _coefficients(config: LossConfig, record: BatchRecord, advantages: list[float]) -> Tensor:
    try:
        return token_coefficients(record, advantages, config).values
    except NonFiniteWeightError as error:
        raise StartError(
            f"{LOSS_FIELD}: {config.loss!r} returned coefficients of trajectory {error.index} that"
            f" add up to {error.value}, on a batch of ratios between 0.4 and 2.5; they must be"
            " finite"
        ) from error


def _differs(field: str, path: str) -> StartError:
    return StartError(
        f"{field}: {path!r} returned other numbers the second time; it must return the same for the"
        " same batch, because every rank calls it"
    )


if __name__ == "__main__":
    sys.exit(main(require_own_functions))
