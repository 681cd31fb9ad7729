r"""At which length a weight is taken, so that the ESS ratio speaks on trajectories of any length.

The rule of `learning_rate` compares rho with rho_on. With trajectories of L tokens and mismatch s2
per token, rho_on = exp(-s2 L) at the level of whole trajectories, and a batch of B cannot show less
than 1/B: past s2 L of about 2, fresh and stale batches look alike. Cut every trajectory into blocks
of about n tokens, and give every block the product of its tokens' ratios as its weight:

    |<------------------ trajectory, L tokens ------------------>|
    |   block, n tokens   |   block, n tokens   |  block, n tokens |      log w = sum of log ratios

    SEQUENCE  n = L      the weight of the gradient; sees every correlation within a trajectory
    BLOCK     n between  sees correlation up to n tokens
    TOKEN     n = 1      sees none: drift that tokens share is lost in their own noise

On policy E[w] = 1 for any block, since w is a ratio of conditional probabilities, and with log w ~
N(-s2 n / 2, s2 n) the ESS ratio of blocks of n_1..n_N tokens is

    rho_on = N / sum_j exp(s2 n_j),        exp(-s2) for tokens, whatever the length.

The meaning is restored by an exponent e: rho^e is what whole trajectories would show, and rho_on^e
is their rho_on, but not below exp(-2), the least that batches of common size can show:

    e = min(-log rho_on(trajectories), 2) / -log rho_on(blocks)  ->  L / n  as s2 -> 0.

The rule is then fed (rho^e, rho_on^e) and stays min(1, rho / rho_on)^p in form, never below B^-p.
What N weights show of rho_on lies above it and scatters (`finite_batch`): `ess_reading` gives where
batches of this size lie on policy, and how low chance alone takes them.
With staleness that adds a variance v per token it says exp(-v L p) up to s2 L = 2, as the law has
it at sequence level, and exp(-2 p v / s2) beyond: there staleness counts in units of the mismatch,
not of the length. A mismatch taken for 10 % less than it is costs fresh batches 10 % of the rate.

AUTO is SEQUENCE while rho_on of whole trajectories is at least exp(-1), and beyond it BLOCK with
s2 n = 1/4, hence e of 4 to 8. The design note 021 shows the figures behind it.

ENERGY is SEQUENCE with log h_i added to every log weight, h_i the norm of the trajectory's gradient
on its own: the ESS of the contributions to the gradient. Where h does not depend on w,

    rho_on = (sum_i h_i)^2 / (B sum_i h_i^2 exp(s2 L_i)).

Sources: VCPO, arXiv 2602.17616, Eq. 5 (the rule, at sequence level). Blocks, exponent and AUTO are
this project's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

from vcpo.algo.arrays import Vector, counts, vector
from vcpo.algo.ess.blocks import near_equal_blocks
from vcpo.algo.ess.finite_batch import finite_batch_law
from vcpo.algo.ess.importance_weights import log_sum_exp
from vcpo.algo.ess.moments import WeightMoments

SEQUENCE_NATS = 1.0
"""-log rho_on of whole trajectories up to which AUTO reads them: 64 of them show 0.45 for 0.37."""

READABLE_NATS = 2.0
"""-log rho_on that readings of blocks stand for at most: 64 trajectories show 0.25 for 0.14."""

BLOCK_NATS = 0.25
"""s2 n of the blocks that AUTO and BLOCK cut: rho_on is 0.78 then, far from every floor."""


_LEAST_RATIO = 1e-300
"""Stands for ratios below any float; a batch of any size shows 1/B of them."""

CHANCE_DEVIATIONS = 2.0
"""Standard deviations that count as chance: about one batch in 25 is lower on policy."""


class EssKind(StrEnum):
    """What a weight of the ESS belongs to."""

    AUTO = "auto"
    """Whole trajectories as long as their ratio can be read, then blocks."""
    SEQUENCE = "sequence"
    """Whole trajectories, as published."""
    BLOCK = "block"
    """Blocks of as many tokens as have a mismatch of 1/4 nat^2."""
    TOKEN = "token"  # noqa: S105 # a unit of text, no secret
    """Single tokens."""
    ENERGY = "energy"
    """Whole trajectories, times the norms of their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EssUnit:
    """Where a batch's trajectories are cut, and what the ESS ratio of the pieces stands for."""

    kind: EssKind
    """The kind in effect, never AUTO."""

    blocks: tuple[tuple[int, ...], ...]
    """[B][pieces] tokens of each piece, in order; the pieces of a trajectory add up to it."""

    exponent: float
    """e: the ESS ratio of the pieces to this power is what whole trajectories would show."""

    on_policy_ess_ratio: float
    """ESS ratio that the pieces have on policy, in (0, 1], in a batch without end; not yet raised
    to the exponent."""

    mismatch_nats: float = 0.0
    """-log of the ratio that mismatch alone leaves of the pieces, at least 0: what makes the ratio
    of a batch scatter. 0 takes the ratio above as exact."""

    def measured(self, fresh: WeightMoments) -> "EssUnit":
        """This unit with the on-policy ratio that fresh pieces of its size show, for any law.

        fresh: moments of many pieces' weights at lag 0, as an `EssWindow` pools them. The exponent
        magnifies what tails the log-normal law does not know of; pieces are short and many, so that
        their ratio can be measured. That of whole trajectories hangs on their lengths and stays.
        """
        if self.kind not in (EssKind.BLOCK, EssKind.TOKEN):
            return self
        return replace(self, on_policy_ess_ratio=fresh.ess_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class EssReading:
    """ESS ratio of a batch and its on-policy counterpart, in the terms of whole trajectories."""

    kind: EssKind
    """The kind in effect, never AUTO."""

    ess_ratio: float
    """Of the pieces, to the power of the exponent; at most 1 and at least rho_on / B."""

    on_policy_ess_ratio: float
    """In [1/B, 1]: what batches of this size show on policy, in the mean of its logarithm."""

    chance_nats: float = 0.0
    """How far below that chance takes the logarithm of the ratio on policy, at least 0: two
    standard deviations, of the batch and of the calibration together."""

    @property
    def relative_ess_ratio(self) -> float:
        """Part of an on-policy batch that is left, min(1, rho / rho_on), in (0, 1]."""
        return min(1.0, self.ess_ratio / self.on_policy_ess_ratio)


def ess_unit(
    kind: EssKind,
    num_tokens: Vector,
    variance_per_token: float | None,
    *,
    gradient_norms: Vector | None = None,
) -> EssUnit:
    """Where to cut a batch of these lengths.

    num_tokens: [B] trained tokens, at least 1.
    variance_per_token: s2, nats^2, as `MismatchCalibration` estimates it; None when it is not known
        yet, which reads whole trajectories in place of blocks and expects a ratio of 1 of them.
    gradient_norms: [B] finite, at least 0 and not all 0; for ENERGY alone.
    Raises: ValueError when empty, at a number out of range, or when ENERGY has no norms.
    """
    num_tokens = counts(num_tokens, "num_tokens")
    _require(num_tokens, variance_per_token)
    variance = variance_per_token or 0.0
    nats = _on_policy_nats(num_tokens, variance)
    match _effective(kind, variance, nats):
        case EssKind.ENERGY:
            expected = _energy_on_policy(num_tokens, variance, gradient_norms)
            return _whole(EssKind.ENERGY, num_tokens, expected, nats)
        case EssKind.TOKEN:
            return _cut(EssKind.TOKEN, num_tokens, 1, variance, nats)
        case EssKind.BLOCK:
            size = max(1, int(min(BLOCK_NATS / variance, max(num_tokens))))
            return _cut(EssKind.BLOCK, num_tokens, size, variance, nats)
    return _whole(EssKind.SEQUENCE, num_tokens, math.exp(-nats), nats)


def _effective(kind: EssKind, variance: float, nats: float) -> EssKind:
    """The kind that a batch with this -log rho_on of whole trajectories is read at."""
    if kind in (EssKind.ENERGY, EssKind.TOKEN):
        return kind
    is_block = kind is EssKind.BLOCK or (kind is EssKind.AUTO and nats > SEQUENCE_NATS)
    return EssKind.BLOCK if is_block and variance > 0.0 else EssKind.SEQUENCE


def ess_reading(
    unit: EssUnit, moments: WeightMoments, *, relative_error: float = 0.0
) -> EssReading:
    """What the weights of a batch's pieces say of it.

    moments: of the pieces' weights, over the whole batch; with ENERGY, of weights times norms.
    relative_error: standard error of the variance per token that the unit was cut by, as a part.
    Raises: NonFiniteWeightError when every weight is 0.
    """
    size = len(unit.blocks)
    law = finite_batch_law(unit.mismatch_nats, sum(map(len, unit.blocks)))
    shown = min(unit.on_policy_ess_ratio * math.exp(law.bias), 1.0)
    expected = max(shown**unit.exponent, 1.0 / size)
    chance = math.hypot(law.deviation, unit.mismatch_nats * relative_error)
    return EssReading(
        kind=unit.kind,
        ess_ratio=max(moments.ess_ratio**unit.exponent, expected / size),
        on_policy_ess_ratio=expected,
        chance_nats=CHANCE_DEVIATIONS * chance * unit.exponent,
    )


def _whole(kind: EssKind, num_tokens: Sequence[int], expected: float, nats: float) -> EssUnit:
    return EssUnit(
        kind=kind,
        blocks=tuple((length,) for length in num_tokens),
        exponent=1.0,
        on_policy_ess_ratio=max(expected, _LEAST_RATIO),
        mismatch_nats=nats,
    )


def _cut(
    kind: EssKind, num_tokens: Sequence[int], size: int, variance: float, whole_nats: float
) -> EssUnit:
    pieces = tuple(near_equal_blocks(length, size) for length in num_tokens)
    sizes = list(chain.from_iterable(pieces))
    nats = _on_policy_nats(sizes, variance)
    return EssUnit(
        kind=kind,
        blocks=pieces,
        exponent=min(whole_nats, READABLE_NATS) / nats if nats > 0.0 else len(sizes) / len(pieces),
        on_policy_ess_ratio=max(math.exp(-nats), 1.0 / len(sizes)),
        mismatch_nats=nats,
    )


def _on_policy_nats(sizes: Sequence[int], variance: float) -> float:
    """-log rho_on of pieces with these lengths, log mean exp(s2 n); 0 when engines agree."""
    if variance == 0.0:
        return 0.0
    return log_sum_exp([variance * size for size in sizes]) - math.log(len(sizes))


def _energy_on_policy(
    num_tokens: Sequence[int], variance: float, gradient_norms: Vector | None
) -> float:
    """(sum h)^2 / (B sum h^2 exp(s2 L)), not below 1/B."""
    norms = None if gradient_norms is None else vector(gradient_norms, "gradient_norms")
    if norms is None or len(norms) != len(num_tokens):
        raise ValueError("gradient_norms is missing or too short: 'energy' needs one a trajectory")
    logs = log_norms(norms)
    spread = [
        2.0 * log_norm + variance * length
        for log_norm, length in zip(logs, num_tokens, strict=True)
    ]
    size = len(num_tokens)
    nats = log_sum_exp(spread) + math.log(size) - 2.0 * log_sum_exp(logs)
    return min(max(math.exp(-nats), 1.0 / size), 1.0)


def log_norms(gradient_norms: Vector) -> list[float]:
    """Logarithms to add to log weights for ENERGY; -inf for a gradient of 0.

    Raises: ValueError when a norm is negative or not finite, or all are 0.
    """
    gradient_norms = vector(gradient_norms, "gradient_norms")
    for index, norm in enumerate(gradient_norms):
        if not 0.0 <= norm < math.inf:
            raise ValueError(f"gradient_norms[{index}] is {norm}: give a finite number, 0 or above")
    if not any(gradient_norms):
        raise ValueError("gradient_norms are all 0: there is no gradient whose ESS could be read")
    return [math.log(norm) if norm > 0.0 else -math.inf for norm in gradient_norms]


def _require(num_tokens: Sequence[int], variance_per_token: float | None) -> None:
    if not num_tokens:
        raise ValueError("num_tokens is empty: at least one trajectory is needed")
    for index, length in enumerate(num_tokens):
        if length < 1:
            raise ValueError(f"num_tokens[{index}] is {length}: give at least 1")
    if variance_per_token is not None and not 0.0 <= variance_per_token < math.inf:
        raise ValueError(
            f"variance_per_token is {variance_per_token}: give a finite number, 0 or above, or None"
        )
