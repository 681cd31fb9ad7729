"""The recipe of a run: its method, and what each stage of the method is."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from vcpo.algo import BaselineScope
from vcpo.api.algorithm import Algorithm

_OFF = ("none", "open")
"""Values of stages that do nothing; they are left out."""

_SCOPES: Final = MappingProxyType(
    {
        BaselineScope.GROUP: "",
        BaselineScope.BATCH: ", one per batch",
        BaselineScope.SHRUNK: ", shrunk toward one per batch",
    }
)


def recipe(algorithm: Algorithm) -> tuple[tuple[str, str], ...]:
    """Return the stages of the method in force, by name, also where the file leaves them to it.

    Baseline and learning-rate rule are always named, the other stages where they do something.
    """
    config = algorithm.loss_config
    scope = _SCOPES[config.baseline_scope]
    optional = (
        ("filter", config.group_filter),
        ("KL penalty", config.kl_penalty),
        ("weight", config.weight),
        ("clipping", config.clipping),
    )
    return (
        ("method", algorithm.method.value),
        *((("loss", algorithm.loss),) if algorithm.loss else ()),
        *((name, stage.value) for name, stage in optional if stage.value not in _OFF),
        ("aggregation", config.aggregation.value),
        ("baseline", f"{config.baseline}{scope}"),
        ("learning-rate rule", config.learning_rate_rule.value),
    )
