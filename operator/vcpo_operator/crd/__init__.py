"""The CustomResourceDefinitions: VCPORun, made from `vcpo.spec`, and VCPORolloutScaler.

`python -m vcpo_operator.crd run` prints one; the chart carries the printed files.
"""

from collections.abc import Callable
from typing import Any, Final

from vcpo_operator.crd.definition import crd
from vcpo_operator.crd.printing import to_yaml
from vcpo_operator.crd.scaler import scaler_crd

DEFINITIONS: Final[dict[str, Callable[[], dict[str, Any]]]] = {"run": crd, "scaler": scaler_crd}
"""Definitions by the name of their file."""

__all__ = ["DEFINITIONS", "crd", "scaler_crd", "to_yaml"]
