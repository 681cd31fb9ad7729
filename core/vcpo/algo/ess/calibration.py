r"""The on-policy ESS ratio, estimated from fresh tokens during a run.

Training and inference engines disagree a little on every token (kernels, bf16, batching). So even a
trajectory that was sampled with the learner's own parameters has w != 1. With a mismatch of
variance s2 per token, and E[w] = 1 because w is a ratio of probabilities,

    log w | L ~ N(-s2 L / 2, s2 L),    L = number of trained tokens.

Prediction. The moments of this log-normal law are E[w] = 1 and E[w^2 | L] = exp(s2 L). For a batch
of lengths L_1..L_B,

    rho_on = E[w]^2 / E[w^2] = 1 / mean_i exp(s2 L_i) = B / sum_i exp(s2 L_i),

the harmonic mean of the ratios exp(-s2 L_i) of the single lengths, and at least 1/B. With
s2 = 6.5e-4, typical of bf16, it is 0.68 at 600 tokens and 0.006 at 8,000. `finite_batch` says what
a batch of B trajectories shows of this ratio.

Observation. A block is a run of `FRESH_BLOCK_TOKENS` tokens that one policy version sampled. It is
fresh while the learner still has that version. Blocks may stand for whole trajectories, for this
reason: given its prefix, the ratio of a token has mean 1 under the behavior policy, whatever the
two policies are. Ratios minus 1 are therefore martingale differences. To first order log w is their
sum, the terms are uncorrelated, and the variance adds up over tokens. Longer blocks would be fewer.
Single tokens are far from normal, because most of them agree to many digits and a few do not.

Estimation. For fresh blocks x_i = log w_i the log likelihood of s2,

    sum_i [ -log(s2 L_i) / 2 - (x_i + s2 L_i / 2)^2 / (2 s2 L_i) ],

has one maximum, where (A / 4) s2^2 + s2 - Q = 0 with A = mean L_i and Q = mean x_i^2 / L_i:

    s2 = 2 (sqrt(1 + A Q) - 1) / A,    with a relative standard error of sqrt(2 / n) at most.

Outliers. A portion is a worker's blocks of one step, or of several until it has 16. Before the
estimate, every x_i is clipped to 3 standard deviations of its own law. The scale of that law comes
from the blocks of the portion, with the largest sixteenth of x_i^2 / L_i replaced by the next lower
value (winsorized). Outliers up to that share do not move the scale. A median would ignore a
mismatch that only a minority of the blocks shows. Clipping 0.27 % of a normal law changes s2 by
less than 1 %. Weights are never exponentiated. Three sums are kept per portion.

Workers. A worker with a fault of its own (temperature, number format, masked logits) must not
decide what counts as normal, because what counts as normal is taken out of the brake. So every
worker has an estimate, and that of the run is their lower median: up to a half of the workers,
whatever they send, cannot raise it above the largest estimate of another. A worker that has shown
fewer than 16 blocks counts as one without mismatch. If the median falls on such a worker, the
estimate of before stays; without one the ratio is 1. The lower median of N workers with n blocks
each is as certain as a mean of n (1 + 2 (m - 1) / pi) blocks, m = N or N - 1, the odd one. A single
worker has no other to be compared with. For it, and for all, s2 is at most `ceiling`.

Memory. A constant mismatch needs a long memory, a changing one a short memory. The newest 1, 2, 4,
6, 10, .. portions of every worker are pooled, and the workers' median is taken over the pools of
each reach. The estimate is that of the longest reach whose interval s2 (1 +- sqrt(2 / n))
intersects the intervals of all shorter ones (intersection of confidence intervals). Without fresh
blocks the estimate stays and its error grows: its variance doubles every 32 steps, up to a relative
error of 1. A worker that shows none in 128 steps in which others do is forgotten.

Limit. For s2 L above about 2, whole trajectories have a ratio near the floor 1/B on policy, too. A
step must then lose far more than the mismatch costs before the rule of `learning_rate` reacts.
Blocks are more sensitive there (see `unit`).

Sources: VCPO, arXiv 2602.17616, Eq. 5 (rho_on as a given constant). Goldenshluger and Nemirovski,
"On spatially adaptive estimation of nonparametric regression" (1997), for the choice of the pool.
The length law, its estimate and its prediction are this project's. The release has one constant per
script (1.0 or 0.55).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from vcpo.algo.arrays import Vector, counts, vector
from vcpo.algo.ess.importance_weights import log_sum_exp, require_log_weights
from vcpo.algo.ess.worker_blocks import Block, FreshSums, WorkerBlocks

FRESH_BLOCK_TOKENS: Final = 32
"""Tokens of a fresh block: enough for a sum to be nearly normal, few enough for many blocks."""

MISMATCH_CEILING: Final = 1e-2
"""Largest s2 that counts as mismatch, nats^2 per token; more is a fault of the engines.

bfloat16 has 6.5e-4 to 2e-3, fp8 1.7e-3, noise of 0.01 on normalization weights 9e-4, and a mixture
of experts without router replay about twice a dense model. A temperature of 0.7 for 1 has 3e-2."""

PRECISE_COUNT: Final = 2048
"""Number of blocks that is enough: it gives a standard error of 3 %."""

_UPKEEP_COUNT: Final = 128
"""Blocks per step that keep a precise estimate current: a change of a third shows in 3 steps."""

_CONFIDENCE: Final = 1.0
"""Half width of the intervals that must intersect, in standard errors."""

_REMEMBERED_STEPS: Final = 128
"""Steps with fresh blocks of others after which a worker without any is forgotten."""

_REMEMBERED_WORKERS: Final = 1024
"""Most workers that are remembered, those that were seen last: 1 MB in a checkpoint."""

STALE_STEPS: Final = 32
"""Steps without fresh blocks in which the variance of the estimate doubles; it then counts as
stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchEstimate:
    """What the workers together say of the mismatch."""

    variance_per_token: float
    """s2, nats^2 per token, at least 0; the median of the workers, before any ceiling."""

    count: int
    """Number of blocks whose mean would be as certain, at least 1."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.variance_per_token < math.inf or self.count < 1:
            raise ValueError(
                f"variance_per_token is {self.variance_per_token} and count {self.count}: "
                "give a finite number of at least 0, and at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchCalibration:
    """Per-token mismatch between the engines, estimated from fresh blocks; immutable."""

    minimum_count: int = 16
    """Number of blocks that a worker has shown before it counts, at least 1; 16 blocks leave a
    standard error of 35 %, which `relative_error` reports."""

    ceiling: float = MISMATCH_CEILING
    """Largest s2 that counts as mismatch, nats^2 per token, above 0: what rounding explains. More
    is not calibrated away."""

    workers: Mapping[str, WorkerBlocks] = field(default_factory=dict)
    """The blocks that each remembered worker has shown, by the worker's name."""

    estimate: MismatchEstimate | None = None
    """Estimate of the last step at which enough workers counted; None before the first such
    step."""

    num_steps: int = 0
    """Steps with fresh blocks, at least 0."""

    age_steps: int = 0
    """Optimizer steps since the last fresh block, or since the start; at least 0."""

    def __post_init__(self) -> None:
        if self.minimum_count < 1 or self.age_steps < 0 or self.num_steps < 0:
            raise ValueError(
                f"minimum_count is {self.minimum_count}, age_steps {self.age_steps} and num_steps "
                f"{self.num_steps}: give at least 1, 0 and 0"
            )

    def observe(
        self, log_weights: Vector, num_tokens: Vector, workers: Sequence[str] | None = None
    ) -> Self:
        """Return the calibration after one more optimizer step with these fresh blocks.

        log_weights: [n] nats, of blocks that the learner's own version sampled. Entries of -inf
            have no scale and are ignored. Without other entries only the age grows.
        num_tokens: [n] trained tokens of each block, at least 1, about `FRESH_BLOCK_TOKENS`.
        workers: [n] name of the worker that sampled each block; None if there is one worker.
        Raises: ValueError if the lengths differ or a block has no token; NonFiniteWeightError for a
        NaN or +inf.
        """
        log_weights, num_tokens = (
            vector(log_weights, "log_weights"),
            counts(num_tokens, "num_tokens"),
        )
        workers = [""] * len(log_weights) if workers is None else workers
        if not len(log_weights) == len(num_tokens) == len(workers):
            raise ValueError(
                f"log_weights has {len(log_weights)} entries, num_tokens {len(num_tokens)} and "
                f"workers {len(workers)}: give one of each per block"
            )
        _require_lengths(num_tokens, at_least=1)
        if log_weights:
            require_log_weights(log_weights)
        shown: dict[str, list[Block]] = {}
        for worker, block in zip(workers, zip(log_weights, num_tokens, strict=True), strict=True):
            if block[0] > -math.inf:
                shown.setdefault(worker, []).append(block)
        if not shown:
            return replace(self, age_steps=self.age_steps + 1)
        return self._after(shown)

    def without(self, workers: Collection[str]) -> Self:
        """Return the calibration without what these workers have shown."""
        if not workers:
            return self
        rest = {name: each for name, each in self.workers.items() if name not in workers}
        return replace(self, workers=rest, estimate=_estimate(rest.values()) or self.estimate)

    @property
    def variance_per_token(self) -> float | None:
        """Estimate of s2, nats^2 per token, up to `ceiling`; None before there is one."""
        if self.estimate is None:
            return None
        return min(self.estimate.variance_per_token, self.ceiling)

    @property
    def relative_error(self) -> float:
        """Standard error of s2 over s2, in [0, 1]; 0 before there is an estimate."""
        if self.estimate is None:
            return 0.0
        count = self.estimate.count
        doublings = min(self.age_steps / STALE_STEPS, math.log2(count))
        return min(1.0, math.sqrt(2.0**doublings * 2.0 / count))

    @property
    def wanted_count(self) -> int:
        """Number of fresh blocks that the next step should score."""
        pooled = 0 if self.estimate is None else self.estimate.count
        return max(PRECISE_COUNT - pooled, _UPKEEP_COUNT)

    def on_policy_ess_ratio(self, num_tokens: Vector) -> float:
        """Return the expected ESS ratio of an on-policy batch, B / sum_i exp(s2 L_i).

        num_tokens: [B] trained tokens of each trajectory, at least 0.
        Returns a value in [1/B, 1]; 1.0 before there is an estimate.
        Raises: ValueError if empty or for a negative length.
        """
        num_tokens = counts(num_tokens, "num_tokens")
        if not num_tokens:
            raise ValueError("num_tokens is empty: at least one trajectory is needed")
        _require_lengths(num_tokens, at_least=0)
        variance_per_token = self.variance_per_token
        if variance_per_token is None:
            return 1.0
        size = len(num_tokens)
        log_sum = log_sum_exp([variance_per_token * length for length in num_tokens])
        return min(max(math.exp(math.log(size) - log_sum), 1.0 / size), 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the observations as JSON values for a checkpoint, without the settings."""
        estimate = self.estimate
        return {
            "age_steps": self.age_steps,
            "num_steps": self.num_steps,
            "estimate": estimate and [estimate.variance_per_token, estimate.count],
            "workers": {name: each.to_dict() for name, each in self.workers.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> Self:
        """Return this calibration's settings with the observations that `to_dict` returned.

        Raises: ValueError if the state has another form or an observation is out of range.
        """
        try:
            estimate = None
            if state["estimate"] is not None:
                variance, count = state["estimate"]
                estimate = MismatchEstimate(variance_per_token=float(variance), count=int(count))
            return replace(
                self,
                workers={
                    str(name): WorkerBlocks.from_dict(each)
                    for name, each in state["workers"].items()
                },
                estimate=estimate,
                num_steps=int(state["num_steps"]),
                age_steps=int(state["age_steps"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state is {str(state)[:80]}: give what to_dict returned ({error})"
            ) from error

    def _after(self, shown: Mapping[str, Sequence[Block]]) -> Self:
        """Return the calibration after a step in which these workers showed blocks."""
        step = self.num_steps + 1
        workers = dict(self.workers)
        for name, blocks in shown.items():
            seen = workers.pop(name, WorkerBlocks())
            # Last in the order: those before were seen earlier.
            workers[name] = seen.observe(blocks, step=step, minimum_count=self.minimum_count)
        recent = [
            (name, each)
            for name, each in workers.items()
            if each.last_step > step - _REMEMBERED_STEPS
        ]
        workers = dict(recent[-_REMEMBERED_WORKERS:])
        return replace(
            self,
            workers=workers,
            estimate=_estimate(workers.values()) or self.estimate,
            num_steps=step,
            age_steps=0,
        )


def _require_lengths(num_tokens: Sequence[int], *, at_least: int) -> None:
    for index, length in enumerate(num_tokens):
        if length < at_least:
            raise ValueError(f"num_tokens[{index}] is {length}: give at least {at_least}")


def _estimate(workers: Collection[WorkerBlocks]) -> MismatchEstimate | None:
    """Return the estimate over the longest reach that agrees with all shorter ones.

    None if the median falls on a worker that does not count yet.
    """
    counting = [each.portions for each in workers if each.portions]
    pools = [portions[-1] for portions in counting]
    chosen: MismatchEstimate | None = None
    low, high = 0.0, math.inf
    for reach in range(1, max(map(len, counting), default=0) + 1):
        if reach > 1:
            pools = [
                pool + portions[-reach] if reach <= len(portions) else pool
                for pool, portions in zip(pools, counting, strict=True)
            ]
        found = _median(pools, num_workers=len(workers))
        if found is None:
            return None
        error = _CONFIDENCE * math.sqrt(2.0 / found.count)
        low = max(low, found.variance_per_token * (1.0 - error))
        high = min(high, found.variance_per_token * (1.0 + error))
        if low > high:
            break
        chosen = found
    return chosen


def _median(pools: Sequence[FreshSums], *, num_workers: int) -> MismatchEstimate | None:
    """Return the lower median over workers, those without a pool counted as the lowest."""
    place = (num_workers - 1) // 2 - (num_workers - len(pools))
    if place < 0:
        return None
    num_odd = len(pools) - 1 + len(pools) % 2
    typical_count = sorted(pool.count for pool in pools)[(len(pools) - 1) // 2]
    return MismatchEstimate(
        variance_per_token=sorted(pool.variance_per_token for pool in pools)[place],
        count=int(typical_count * (1.0 + (num_odd - 1) * 2.0 / math.pi)),
    )
