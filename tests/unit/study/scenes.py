"""A small study, and cells' records as a test wants them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vcpo.spec import parse_document
from vcpo_study.cell import Cell, Selection, grid_cells
from vcpo_study.records import CellRecord, EvaluationRow, StepRow
from vcpo_study.study import StudySpec, VCPOStudy

STUDY = """
apiVersion: vcpo.dev/v1alpha1
kind: VCPOStudy
metadata: {name: small}
spec:
  run:
    model: {name: tiny}
    environment: {name: sort_digits}
    steps: 40
    algorithm: {importanceWeightCap: 4.0}
    evaluation: {everySteps: 10}
  methods:
    - {name: vcpo, title: VCPO}
    - {name: plain, algorithm: {baseline: groupMean, learningRateRule: none}}
  lags: [0, 32, 128]
  seeds: [1, 2]
  tuning: {learningRates: [1.0e-4, 1.0e-3], lag: 32, seeds: [101]}
  subject: vcpo
  uncontrolled: plain
"""


def study_document(text: str = STUDY) -> VCPOStudy:
    return parse_document(text, VCPOStudy, source="study.yaml")


def study() -> StudySpec:
    return study_document().spec


def cell(method: str = "vcpo", lag: int = 0, seed: int = 1, rate: float = 1e-4) -> Cell:
    selection = Selection(methods=frozenset({method}), lags=frozenset({lag}))
    (found,) = [
        each for each in grid_cells(study(), selection, {method: rate}) if each.seed == seed
    ]
    return found


def evaluations(*accuracies: float) -> tuple[EvaluationRow, ...]:
    return tuple(
        EvaluationRow(step=10 * index, accuracy=accuracy)
        for index, accuracy in enumerate(accuracies)
    )


def step_row(step: int, **changes: Any) -> StepRow:
    values: dict[str, Any] = {
        "step": step,
        "reward_mean": 0.5,
        "ess_ratio": 0.5,
        "on_policy_ess_ratio": 1.0,
        "kl_per_token": 0.01,
        "ess": 40.0,
        "token_ess_ratio": 0.9,
        "masked_share": 0.0,
        "top_gradient_share": 0.1,
        "importance_weight_max": 2.0,
        "gradient_norm": 0.1,
        "learning_rate": 1e-4,
        "learning_rate_scale": math.sqrt(0.5),
        "skipped": None,
    }
    return StepRow(**(values | changes))


def record(
    method: str = "vcpo",
    lag: int = 0,
    accuracies: Sequence[float] = (0.5, 1.0),
    *,
    seed: int = 1,
    learning_rate: float = 1e-4,
) -> CellRecord:
    return CellRecord(
        method=method,
        lag=lag,
        learning_rate=learning_rate,
        seed=seed,
        digest="d",
        cpu_s=2.0,
        steps=tuple(step_row(step) for step in range(1, 10 * len(accuracies) - 9)),
        evaluations=evaluations(*accuracies),
    )
