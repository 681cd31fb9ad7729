r"""The number of tokens that share one importance weight, chosen so that the ESS ratio is readable.

The rule of `learning_rate` compares rho with rho_on. With trajectories of L tokens and mismatch s2
per token, rho_on = exp(-s2 L) for whole trajectories. A batch of B cannot show less than 1/B, so
for s2 L above about 2 fresh and stale batches look alike. The remedy: divide every trajectory into
blocks of about n tokens. The weight of a block is the product of its token ratios:

    |<------------------ trajectory, L tokens ------------------>|
    |   block, n tokens   |   block, n tokens   |  block, n tokens |      log w = sum of log ratios

    SEQUENCE  n = L          the weight of the gradient; includes every correlation of tokens
    BLOCK     1 <= n <= L    includes correlation over up to n tokens
    TOKEN     n = 1          includes no correlation: a common drift is lost in the tokens' noise

On policy E[w] = 1 for any block, because w is a ratio of conditional probabilities. With
log w ~ N(-s2 n / 2, s2 n) the ESS ratio of blocks of n_1..n_N tokens is

    rho_on = N / sum_j exp(s2 n_j),        exp(-s2) for tokens, whatever the length.

An exponent e converts block ratios to trajectory ratios: rho^e is the ratio that whole trajectories
would show. rho_on^e is their rho_on, and at least exp(-2): a batch of common size shows no less:

    e = min(-log rho_on(trajectories), 2) / -log rho_on(blocks)  ->  L / n  as s2 -> 0.

The rule takes (rho^e, rho_on^e). `ess_reading` returns the on-policy value for a batch of this
size, and how far chance alone lowers it (`finite_batch`).

AUTO is SEQUENCE while rho_on of whole trajectories is at least exp(-1). Otherwise it is BLOCK with
s2 n = 1/4, which gives e of 4 to 8. docs/inside/mathematics.md has the figures.

Sources: VCPO, arXiv 2602.17616, Eq. 5 (the rule, at sequence level). Blocks, exponent and AUTO are
this project's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import SupportsInt

from vcpo.algo.arrays import Vector, counts
from vcpo.algo.ess.finite_batch import finite_batch_law
from vcpo.algo.ess.importance_weights import WeightMoments, log_sum_exp

SEQUENCE_NATS = 1.0
"""Largest -log rho_on of whole trajectories at which AUTO uses them; 64 trajectories then show 0.45
for 0.37."""

READABLE_NATS = 2.0
"""Largest -log rho_on of whole trajectories that block ratios are converted to; 64 trajectories
then show 0.25 for 0.14."""

BLOCK_NATS = 0.25
"""s2 n of the blocks of AUTO and BLOCK: their rho_on is 0.78, far above the floor."""

_LEAST_RATIO = 1e-300
"""Lower bound of ratios, so that none underflows to 0; every batch shows at least 1/B."""

CHANCE_DEVIATIONS = 2.0
"""Standard deviations that count as chance; about one on-policy batch in 25 is lower."""


class EssKind(StrEnum):
    """The unit that has one importance weight."""

    AUTO = "auto"
    """Whole trajectories while their ratio is readable, otherwise blocks."""
    SEQUENCE = "sequence"
    """Whole trajectories, as published."""
    BLOCK = "block"
    """Blocks of as many tokens as have a mismatch of 1/4 nat^2."""
    TOKEN = "token"  # noqa: S105 # a unit of text, no secret
    """Single tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EssUnit:
    """Division of a batch's trajectories into blocks, and the meaning of the blocks' ESS ratio."""

    kind: EssKind
    """The kind in effect, never AUTO."""

    blocks: tuple[tuple[int, ...], ...]
    """[B][blocks] number of tokens of each block, in order; they add up to the trajectory."""

    exponent: float
    """e: the blocks' ESS ratio to this power is the ratio that whole trajectories would show."""

    on_policy_ess_ratio: float
    """ESS ratio that on-policy blocks would have in an infinite batch, in (0, 1], before the
    exponent."""

    mismatch_nats: float = 0.0
    """-log of the blocks' ESS ratio under mismatch alone, nats, at least 0. It determines the
    scatter of a batch's ratio; 0 means no scatter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EssReading:
    """ESS ratio of a batch and its on-policy value, converted to whole trajectories."""

    kind: EssKind
    """The kind in effect, never AUTO."""

    ess_ratio: float
    """ESS ratio of the blocks to the power of the exponent, in [rho_on / B, 1]."""

    on_policy_ess_ratio: float
    """ESS ratio that on-policy batches of this size have (mean of the logarithm), in [1/B, 1]."""

    mismatch_nats: float = 0.0
    """-log of the ratio that on-policy blocks have in an infinite batch, nats, at least 0."""

    chance_nats: float = 0.0
    """How far chance lowers the logarithm of the on-policy ratio, nats, at least 0: two standard
    deviations, of the batch and of the calibration together."""


def ess_unit(kind: EssKind, num_tokens: Vector, variance_per_token: float | None) -> EssUnit:
    """Return the unit for a batch of trajectories of these lengths.

    num_tokens: [B] trained tokens of each trajectory, at least 1.
    variance_per_token: s2, nats^2, as `MismatchCalibration` estimates it. None if it is unknown:
        whole trajectories then take the place of blocks, with an on-policy ratio of 1.
    """
    num_tokens = counts(num_tokens, "num_tokens")
    variance = variance_per_token or 0.0
    nats = _on_policy_nats(num_tokens, variance)
    match _kind_in_effect(kind, variance, nats):
        case EssKind.TOKEN:
            return _unit_of_blocks(EssKind.TOKEN, num_tokens, 1, variance, nats)
        case EssKind.BLOCK:
            size = max(1, int(min(BLOCK_NATS / variance, max(num_tokens))))
            return _unit_of_blocks(EssKind.BLOCK, num_tokens, size, variance, nats)
    return EssUnit(
        kind=EssKind.SEQUENCE,
        blocks=tuple((length,) for length in num_tokens),
        exponent=1.0,
        on_policy_ess_ratio=max(math.exp(-nats), _LEAST_RATIO),
        mismatch_nats=nats,
    )


def _kind_in_effect(kind: EssKind, variance: float, nats: float) -> EssKind:
    """Resolve AUTO, and BLOCK without mismatch; nats: -log rho_on of whole trajectories."""
    if kind is EssKind.TOKEN:
        return kind
    is_block = kind is EssKind.BLOCK or (kind is EssKind.AUTO and nats > SEQUENCE_NATS)
    return EssKind.BLOCK if is_block and variance > 0.0 else EssKind.SEQUENCE


def ess_reading(
    unit: EssUnit, moments: WeightMoments, *, relative_error: float = 0.0
) -> EssReading:
    """Return the ESS ratio of a batch from the weights of its blocks.

    moments: of the blocks' weights over the whole batch.
    relative_error: standard error of the unit's variance per token over that variance.
    Raises: NonFiniteWeightError if every weight is 0.
    """
    size = len(unit.blocks)
    law = finite_batch_law(unit.mismatch_nats, sum(map(len, unit.blocks)))
    in_this_batch = min(unit.on_policy_ess_ratio * math.exp(law.bias), 1.0)
    expected = max(in_this_batch**unit.exponent, 1.0 / size)
    chance = math.hypot(law.deviation, unit.mismatch_nats * relative_error)
    return EssReading(
        kind=unit.kind,
        ess_ratio=max(moments.ess_ratio**unit.exponent, expected / size),
        on_policy_ess_ratio=expected,
        mismatch_nats=unit.mismatch_nats,
        chance_nats=CHANCE_DEVIATIONS * chance * unit.exponent,
    )


def _unit_of_blocks(
    kind: EssKind, num_tokens: Sequence[int], size: int, variance: float, whole_nats: float
) -> EssUnit:
    blocks = tuple(near_equal_blocks(length, size) for length in num_tokens)
    sizes = list(chain.from_iterable(blocks))
    nats = _on_policy_nats(sizes, variance)
    return EssUnit(
        kind=kind,
        blocks=blocks,
        exponent=min(whole_nats, READABLE_NATS) / nats if nats > 0.0 else len(sizes) / len(blocks),
        on_policy_ess_ratio=max(math.exp(-nats), 1.0 / len(sizes)),
        mismatch_nats=nats,
    )


def _on_policy_nats(sizes: Sequence[int], variance: float) -> float:
    if variance == 0.0:
        return 0.0
    return log_sum_exp([variance * size for size in sizes]) - math.log(len(sizes))


def near_equal_blocks(num_tokens: SupportsInt, size: SupportsInt) -> tuple[int, ...]:
    """Return the number of tokens of each block of a trajectory, longer blocks first.

    There are num_tokens / size blocks, rounded, and at least one. Lengths differ by at most 1.
    """
    num_tokens = int(num_tokens)
    count = max(1, round(num_tokens / int(size)))
    shorter, longer = divmod(num_tokens, count)
    return (shorter + 1,) * longer + (shorter,) * (count - longer)
