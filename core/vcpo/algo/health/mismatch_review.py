"""Do workers and learner compute the same policy? Judged after every step by fresh tokens.

Training would treat a gap between the two as staleness, or calibrate it away: nothing fails, and
the run is worthless. So what rounding does not explain (`mismatch_limits`) is told, and refused
where it is sure.

Each worker is judged by its newest 64 blocks, and the run by the lower median of its workers: up to
a half of them, whatever they send, neither hide a fault of the others nor make one.

    a worker is at fault     its gap, or its scale error, is sure to exceed the limit, and those of
                             the median worker do not: it is set aside
    the engines disagree     the median worker exceeds a limit
    it is sure               its gap does so twice over, or the on-policy ESS ratio is below the
                             floor exp(-s2 L), s2 being the variance of the measured rounding,
                             and the newest blocks of the median worker vary more than s2

The cause is named by how the gap is spread over the tokens: `MismatchCause`.

Source: the audit of Jet-RL, arXiv 2601.14243 (gap of log-probabilities at lag 0). Limits, causes
and scale error are this project's.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Self

from vcpo.algo.ess.calibration import MismatchCalibration
from vcpo.algo.health.fresh_tokens import (
    DEVIATIONS,
    MIN_FRESH_BLOCKS,
    Estimate,
    FreshTokens,
    gap_of,
    gap_quantile,
    lower_median,
    position_bin,
    scale_error_of,
    variance_of,
    without_largest_gaps,
)
from vcpo.algo.health.mismatch_limits import NEGLIGIBLE_VARIANCE, MismatchLimits

WINDOW_BLOCKS: Final = 64
"""Newest blocks of a worker by which it is judged."""

_REMEMBERED_STEPS: Final = 128
"""Steps with fresh blocks of others after which a worker without any is forgotten."""

_REMEMBERED_WORKERS: Final = 1024
"""Most workers that are remembered, those that were seen last."""

_SURE: Final = 2.0
"""Factor on the limit beyond which the median worker is refused."""

_GROWTH: Final = 2.0
"""Factor between the gaps of late and of early tokens from which a gap grows with the position."""

_BIN_BLOCKS: Final = 4
"""Blocks of a bin of positions from which it is compared with others."""

_SCALE_SHARE: Final = 0.5
"""Share of the squared log ratios from which their slope over log mu is the cause."""


class MismatchError(RuntimeError):
    """Rollout engine and learner do not compute the same policy."""


class MismatchCause(StrEnum):
    """How a gap is spread over workers and tokens, which says what to look at."""

    ONE_WORKER = "oneWorker"
    """Some workers have it and most do not."""
    GROWS_WITH_POSITION = "growsWithPosition"
    """Late tokens of an answer have more of it than early ones."""
    SCALE = "scale"
    """The logits of workers are those of the learner times a factor."""
    CONSTANT = "constant"
    """It is the same at all positions."""

    @property
    def advice(self) -> str:
        """What to look at, as a clause."""
        return _ADVICE[self]


_ADVICE: Final = {
    MismatchCause.ONE_WORKER: "compare its temperature, its precision, its quantization and its"
    " masked logits with those of the other workers",
    MismatchCause.GROWS_WITH_POSITION: "it grows with the position in the answer: compare"
    " positions, the scaling of RoPE, and the cache of keys and values",
    MismatchCause.SCALE: "it grows with the surprisal of a token: compare the temperature",
    MismatchCause.CONSTANT: "it is the same at all positions: compare the model's revision, the"
    " tokenizer, the temperature, `precision`, `quantization` and `noise` of the rollout groups,"
    " and state of the model that is no parameter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGap:
    """What the newest fresh tokens of a worker say."""

    gap: Estimate
    scale_error: Estimate | None
    logprob_variance: float
    """Variance of log mu over tokens, nats^2."""
    num_tokens: int
    num_blocks: int

    @property
    def is_enough(self) -> bool:
        """Whether the worker can be judged alone."""
        return self.num_blocks >= MIN_FRESH_BLOCKS

    def exceeds(self, limits: MismatchLimits) -> bool:
        """Whether the worker exceeds a limit; of the scale error, whether it is sure to."""
        return not self.gap.value <= limits.gap_nats or self._is_scaled(limits)

    def surely_exceeds(self, limits: MismatchLimits, factor: float = 1.0) -> bool:
        """Whether it is sure to exceed the limit of the gap times a factor, or the scale error."""
        return not self.gap.least <= factor * limits.gap_nats or (
            factor == 1.0 and self._is_scaled(limits)
        )

    def _is_scaled(self, limits: MismatchLimits) -> bool:
        scale = self.scale_error
        if scale is None or limits.scale_error is None:
            return False
        variance = scale.least_size**2 * self.logprob_variance
        return scale.least_size > limits.scale_error and not variance <= NEGLIGIBLE_VARIANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchFault:
    """A worker whose log-probabilities are not those of the policy that it samples from."""

    worker: str
    gap_nats: float
    """Mean of |r|, nats per token."""
    scale_error: float
    """Slope of r over log mu; 0 where it is unknown."""
    limits: MismatchLimits
    num_tokens: int
    """Fresh tokens that show it."""
    usual_nats: float
    """Gap of the median worker."""

    @property
    def message(self) -> str:
        """What the worker did and what to look at, as a clause."""
        slope = f" (slope over log mu {self.scale_error:+.2g})" if self.scale_error else ""
        return (
            f"it differs from the learner by {self.gap_nats:.3g} nats per token{slope} on"
            f" {self.num_tokens} fresh tokens, and the median worker by {self.usual_nats:.2g}; at"
            f" most {self.limits.gap_nats:.3g} is expected; {MismatchCause.ONE_WORKER.advice}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchReview:
    """What the fresh tokens say of the workers after a step; the numbers are of median workers."""

    workers: Mapping[str, WorkerGap] = field(default_factory=dict)
    limits: MismatchLimits | None = None
    gap_nats: float | None = None
    """Mean of |r|, nats per token; None while there are too few fresh tokens, as for the rest."""
    gap_p99_nats: float | None = None
    divergence_nats: float | None = None
    """KL(mu || pi), nats per token."""
    scale_error: float | None = None
    gap_by_position: Mapping[int, float] = field(default_factory=dict)
    """Mean of |r| by the position at which a bin begins (`position_bin`), nats per token."""
    at_fault: tuple[MismatchFault, ...] = ()
    is_exceeded: bool = False
    """Whether the median worker exceeds a limit."""
    is_sure: bool = False
    """Whether nothing but a fault of the engines is left to explain it."""
    cause: MismatchCause | None = None
    """Cause of a gap that exceeds a limit; None if no limit is exceeded."""

    @property
    def message(self) -> str:
        """How far workers and learner differ and what to look at, in a sentence."""
        gap = math.nan if self.gap_nats is None else self.gap_nats
        limit = math.nan if self.limits is None else self.limits.gap_nats
        num_tokens = sum(each.num_tokens for each in self.workers.values())
        slope = f", with a slope over log mu of {self.scale_error:+.2g}" if self.scale_error else ""
        advice = "" if self.cause is None else f": {self.cause.advice}"
        return (
            f"rollout engine and learner differ by {gap:.3g} nats per token on {num_tokens} fresh"
            f" tokens{slope}; at most {limit:.3g} is expected. They do not compute the same"
            f" policy{advice}"
        )

    def is_majority(self, num_awaited: int) -> bool:
        """Return whether the verdict holds if those to come exceed no limit.

        num_awaited: workers that have yet to come, at least 0. With none the review is the verdict,
        also where only the calibration of all workers together exceeds a limit.
        """
        if self.limits is None or num_awaited == 0:
            return self.is_exceeded
        far = sum(each.exceeds(self.limits) for each in self.workers.values())
        total = len(self.workers) + num_awaited
        return total - far <= (total - 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    blocks: tuple[FreshTokens, ...]
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchWindow:
    """The newest fresh blocks of every worker; immutable."""

    workers: Mapping[str, _Seen] = field(default_factory=dict)
    num_steps: int = 0
    """Steps with fresh blocks."""

    def observe(self, shown: Mapping[str, Sequence[FreshTokens]]) -> Self:
        """Return the window after a step. shown: blocks by worker, in the order of sampling."""
        if not shown:
            return self
        step, workers = self.num_steps + 1, dict(self.workers)
        for name, blocks in shown.items():
            before = workers.pop(name).blocks if name in workers else ()
            workers[name] = _Seen(blocks=(*before, *blocks)[-WINDOW_BLOCKS:], last_step=step)
        recent = [
            (name, each)
            for name, each in workers.items()
            if each.last_step > step - _REMEMBERED_STEPS
        ]
        return type(self)(workers=dict(recent[-_REMEMBERED_WORKERS:]), num_steps=step)

    def without(self, names: Sequence[str]) -> Self:
        """Return the window without what these workers have shown."""
        rest = {name: each for name, each in self.workers.items() if name not in names}
        return type(self)(workers=rest, num_steps=self.num_steps)

    def review(
        self, limits: MismatchLimits | None, calibration: MismatchCalibration | None = None
    ) -> MismatchReview:
        """Return what the window says. calibration: on policy, with this step's fresh blocks."""
        pools = {name: without_largest_gaps(seen.blocks) for name, seen in self.workers.items()}
        pools = {name: blocks for name, blocks in pools.items() if blocks}
        if sum(len(seen.blocks) for seen in self.workers.values()) < MIN_FRESH_BLOCKS:
            return MismatchReview(limits=limits)
        gaps = {name: self._gap(name, blocks) for name, blocks in pools.items()}
        review = MismatchReview(
            workers=gaps,
            limits=limits,
            gap_nats=lower_median([each.gap.value for each in gaps.values()]),
            gap_p99_nats=lower_median(
                [gap_quantile(seen.blocks, 0.99) for seen in self.workers.values()]
            ),
            divergence_nats=lower_median([_divergence(blocks) for blocks in pools.values()]),
            scale_error=_median_scale(gaps.values()),
            gap_by_position=_by_position(pools.values()),
        )
        return review if limits is None else _judge(review, limits, pools, calibration)

    def to_dict(self) -> dict[str, Any]:
        """Return the window as plain values for a checkpoint."""
        return {
            "num_steps": self.num_steps,
            "workers": {
                name: [each.last_step, [list(astuple(block)) for block in each.blocks]]
                for name, each in self.workers.items()
            },
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return what `to_dict` returned.

        Raises: ValueError if the state has another form.
        """
        names = FreshTokens.__slots__
        try:
            return cls(
                num_steps=int(state["num_steps"]),
                workers={
                    str(name): _Seen(
                        last_step=int(last_step),
                        blocks=tuple(
                            FreshTokens(**dict(zip(names, block, strict=True))) for block in blocks
                        ),
                    )
                    for name, (last_step, blocks) in state["workers"].items()
                },
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state is {str(state)[:80]}: give what to_dict returned ({error})"
            ) from error

    def _gap(self, name: str, blocks: Sequence[FreshTokens]) -> WorkerGap:
        total = sum(blocks, FreshTokens())
        return WorkerGap(
            gap=gap_of(blocks),
            scale_error=scale_error_of(blocks),
            logprob_variance=total.logprob_spread / total.num_tokens,
            num_tokens=sum(each.num_tokens for each in self.workers[name].blocks),
            num_blocks=len(self.workers[name].blocks),
        )


def is_below_ess_floor(calibration: MismatchCalibration, limits: MismatchLimits) -> bool:
    """Return whether the on-policy ESS ratio is sure to be below exp(-s2 L) at every length L.

    s2 is the variance per token that is explained. What is calibrated ends there; see
    `MismatchCalibration.ceiling`.
    """
    estimate = calibration.estimate
    if estimate is None:
        return False
    error = DEVIATIONS * math.sqrt(2.0 / estimate.count)
    return estimate.variance_per_token * (1.0 - error) > limits.variance


def _judge(
    review: MismatchReview,
    limits: MismatchLimits,
    pools: Mapping[str, Sequence[FreshTokens]],
    calibration: MismatchCalibration | None,
) -> MismatchReview:
    """Return the review with its verdict."""
    gaps = review.workers
    needed = len(gaps) - (len(gaps) - 1) // 2  # that must exceed for their lower median to do so
    is_sure = sum(each.surely_exceeds(limits, _SURE) for each in gaps.values()) >= needed
    shown = [variance_of(blocks) for blocks in pools.values()]
    is_low = (
        calibration is not None
        and is_below_ess_floor(calibration, limits)
        # A policy that is sure of nearly all tokens has its rounding in a few blocks. They are in
        # the calibration, and what rounding explains is without them. Where one block has nearly
        # all of a variance, one standard error is as large.
        and lower_median([each.value - each.error for each in shown]) > limits.variance
    )
    if is_low or sum(each.exceeds(limits) for each in gaps.values()) >= needed:
        return replace(
            review,
            is_exceeded=True,
            is_sure=(is_sure or (is_low and limits.is_measured)) and limits.is_current,
            cause=_cause(review, limits, list(pools.values())),
        )
    usual = math.nan if review.gap_nats is None else review.gap_nats
    at_fault = tuple(
        MismatchFault(
            worker=name,
            gap_nats=each.gap.value,
            scale_error=each.scale_error.value if each.scale_error else 0.0,
            limits=limits,
            num_tokens=each.num_tokens,
            usual_nats=usual,
        )
        for name, each in gaps.items()
        if each.is_enough and each.surely_exceeds(limits)
    )
    return replace(review, at_fault=at_fault, cause=MismatchCause.ONE_WORKER if at_fault else None)


def _cause(
    review: MismatchReview, limits: MismatchLimits, pools: Sequence[Sequence[FreshTokens]]
) -> MismatchCause:
    """Return how the gap of most workers is spread over tokens."""
    if review.gap_nats is not None and review.gap_nats <= limits.gap_nats:
        is_low = abs(review.scale_error or 0.0) <= (limits.scale_error or math.inf)
        return MismatchCause.CONSTANT if is_low else MismatchCause.SCALE
    if _grows(pools):
        return MismatchCause.GROWS_WITH_POSITION
    scale_error = review.scale_error or 0.0
    shares = []
    for blocks in pools:
        total = sum(blocks, FreshTokens())
        is_known = 0.0 < total.square < math.inf
        share = scale_error**2 * total.logprob_spread / total.square if is_known else 0.0
        shares.append(share)
    is_scaled = lower_median(shares) >= _SCALE_SHARE
    return MismatchCause.SCALE if is_scaled else MismatchCause.CONSTANT


def _grows(pools: Sequence[Sequence[FreshTokens]]) -> bool:
    """Whether the gap of most workers that show early and late tokens grows from one to the other.

    Early are the tokens of the first bin that a worker has, late those of its last bin.
    """
    found = []
    for blocks in pools:
        bins: dict[int, list[FreshTokens]] = {}
        for block in blocks:
            bins.setdefault(position_bin(block.position), []).append(block)
        known = sorted(place for place, each in bins.items() if len(each) >= _BIN_BLOCKS)
        if len(known) >= 2:
            early, late = gap_of(bins[known[0]]), gap_of(bins[known[-1]])
            found.append(late.least > _GROWTH * early.value)
    return 2 * sum(found) > len(found)


def _by_position(pools: Iterable[Sequence[FreshTokens]]) -> dict[int, float]:
    """Return the median worker's gap in each bin of positions."""
    means: dict[int, list[float]] = {}
    for blocks in pools:
        bins: dict[int, FreshTokens] = {}
        for block in blocks:
            place = position_bin(block.position)
            bins[place] = bins.get(place, FreshTokens()) + block
        for place, total in bins.items():
            means.setdefault(place, []).append(total.mean_gap)
    return {place: lower_median(means[place]) for place in sorted(means)}


def _divergence(blocks: Sequence[FreshTokens]) -> float:
    total = sum(blocks, FreshTokens())
    return total.divergence / total.num_tokens


def _median_scale(gaps: Iterable[WorkerGap]) -> float | None:
    """Return the scale error whose size is the median one; None if no worker has any."""
    known = sorted((each.scale_error.value for each in gaps if each.scale_error), key=abs)
    return known[(len(known) - 1) // 2] if known else None
