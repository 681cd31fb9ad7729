"""The learner's message as signals of the control loop."""

from __future__ import annotations

import pytest

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.learner_control import run_signals
from vcpo.wire.v1 import control_pb2


def message(**fields) -> control_pb2.Signals:
    return control_pb2.Signals(on_policy_ess_ratio=0.9, batch_trajectories=16, **fields)


def test_the_early_warning_is_read_with_its_level():
    seen = run_signals(message(warning_score=0.75, warning_level="critical"))
    assert (seen.warning_score, seen.warning_level) == (0.75, WarningLevel.CRITICAL)


def test_a_learner_that_reports_no_early_warning_has_none():
    seen = run_signals(message())
    assert (seen.warning_score, seen.warning_level) == (None, None)


def test_a_level_that_nobody_knows_is_refused_by_name():
    expected = "warning_level must be one of ok, warn, critical, dead, not 'odd'"
    with pytest.raises(ValueError, match=expected):
        run_signals(message(warning_score=0.75, warning_level="odd"))
