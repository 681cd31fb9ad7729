"""The CustomResourceDefinitions: VCPORun, generated from `vcpo.spec`, and VCPORolloutScaler.

`python -m vcpo_operator.crd run` prints one of them; the chart holds the printed files.
"""

from collections.abc import Callable
from typing import Any, Final

from vcpo_operator.crd.frame import to_yaml
from vcpo_operator.crd.run import run_crd
from vcpo_operator.crd.scaler import scaler_crd

DEFINITIONS: Final[dict[str, Callable[[], dict[str, Any]]]] = {"run": run_crd, "scaler": scaler_crd}
"""Definitions by the name of their file."""

__all__ = ["DEFINITIONS", "run_crd", "scaler_crd", "to_yaml"]
