"""Loss and baseline as functions that a run's file names: `package.module:function`.

Both are found, called and checked here, the shipped loss too.

    loss        (record: BatchRecord, advantages: Tensor [B], config: LossConfig)
                -> TokenCoefficients
    baseline    some of rewards, num_tokens, log_weights, squared_norms [n] and coverage, by the
                names of its parameters -> the advantages [n] of trajectories that share a baseline

Every rank calls them on the same numbers and must get the same from them.
"""

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcpo.algo.advantage import AdvantageFunction, numbers_wanted
from vcpo.algo.baseline import Baseline
from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.methods import SURROGATE_LOSS, LossConfig
from vcpo.api.algorithm import NORM_BASELINES
from vcpo.service.plugins import beside_or_in, import_named
from vcpo_learner.estimator.record import BatchRecord, TokenCoefficients

LOSS_FIELD = "spec.algorithm.loss"
BASELINE_FIELD = "spec.algorithm.baseline"


class OwnFunctionError(ValueError):
    """A user's function is missing, fails or returns what cannot be used; names the field."""


LossFunction = Callable[[BatchRecord, Tensor, LossConfig], TokenCoefficients]


@cache
def loss_function(path: str) -> LossFunction:
    """Return the loss that a path names; a user's own checks what it returns.

    Raises: OwnFunctionError if there is none, or it takes other arguments.
    """
    function: LossFunction = _function(path, LOSS_FIELD)
    if path == SURROGATE_LOSS:
        return function
    try:
        inspect.signature(function).bind("record", "advantages", "config")
    except (TypeError, ValueError) as error:
        what = f"must take (record, advantages, config), but {error}"
        raise _error(LOSS_FIELD, path, what) from error

    def checked(record: BatchRecord, advantages: Tensor, config: LossConfig) -> TokenCoefficients:
        with torch.no_grad():
            found = _call(LOSS_FIELD, path, function, record, advantages, config)
        return _coefficients(found, path, record)

    return checked


def advantage_function(baseline: Baseline | str) -> Baseline | AdvantageFunction:
    """Return a shipped baseline as it is, and for a path the function that it names.

    Raises: OwnFunctionError if there is none, or it has a parameter of another name.
    """
    return baseline if isinstance(baseline, Baseline) else _own_baseline(baseline)


def wants_norms(baseline: Baseline | str) -> bool:
    """Return whether a baseline, shipped or a user's, reads gradient norms."""
    function = advantage_function(baseline)
    if isinstance(function, Baseline):
        return function in NORM_BASELINES
    return "squared_norms" in numbers_wanted(function)


@cache
def _own_baseline(path: str) -> AdvantageFunction:
    function = _function(path, BASELINE_FIELD)
    try:
        numbers_wanted(function)
    except ValueError as error:
        raise _error(BASELINE_FIELD, path, f"cannot be called: {error}") from error

    @wraps(function)
    def checked(**numbers: Any) -> list[float]:
        found = _call(BASELINE_FIELD, path, function, **numbers)
        return _numbers(found, path, numbers)

    return checked


def _numbers(found: Any, path: str, given: dict[str, Any]) -> list[float]:
    """Return a baseline's result as plain numbers, one for each trajectory."""
    sizes = [len(each) for each in given.values() if isinstance(each, Sequence)]
    try:
        values = list(map(float, found))
    except (TypeError, ValueError) as error:
        what = "it must return the advantage of each trajectory, a list of numbers"
        raise _error(BASELINE_FIELD, path, f"returned {found!r:.80}; {what}") from error
    if sizes and len(values) != sizes[0]:
        what = f"returned {len(values)} numbers for {sizes[0]} trajectories"
        raise _error(BASELINE_FIELD, path, f"{what}; it must return one for each")
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise NonFiniteWeightError(f"{BASELINE_FIELD} {path!r}", index, value)
    return values


def _coefficients(found: object, path: str, record: BatchRecord) -> TokenCoefficients:
    """Return a loss's result on the record's device, in float64."""
    if not isinstance(found, TokenCoefficients):
        what = f"returned {type(found).__name__}; it must return TokenCoefficients(values=...)"
        raise _error(LOSS_FIELD, path, what)
    values, expected = found.values, tuple(record.rollout_logprobs.shape)
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != expected:
        what = (
            f"returned values of {shape}; they must be a tensor of {expected}, one for each"
            " trained token"
        )
        raise _error(LOSS_FIELD, path, what)
    return TokenCoefficients(
        values=values.detach().to(record.rewards), masked_share=float(found.masked_share)
    )


def _function(path: str, field: str) -> Callable[..., Any]:
    try:
        found = import_named(path, field=field, fix=beside_or_in("learner"))
    except ValueError as error:
        raise OwnFunctionError(str(error)) from error
    if not callable(found) or isinstance(found, type):
        raise _error(field, path, "is not a function")
    function: Callable[..., Any] = found
    return function


def _call(field: str, path: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        return function(*given, **named)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # user code may raise anything
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [each for each in frames if each.filename == frames[0].filename]
        where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
        raise _error(field, path, f"raised {type(error).__name__}: {error}{where}") from error


def _error(field: str, path: str, what: str) -> OwnFunctionError:
    return OwnFunctionError(f"{field}: {path!r} {what}")
