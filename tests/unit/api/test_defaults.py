"""A short file is a whole run: every unset field has a default that works."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from vcpo.algo.advantage import BaselineScope
from vcpo.algo.baseline import Baseline
from vcpo.algo.ess.learning_rate import LearningRateRule
from vcpo.algo.methods import Aggregation, Method, Weight
from vcpo.api import API_VERSION, KIND, VCPORun, parse_run

ON_ONE_SCREEN = """
apiVersion: vcpo.dev/v1alpha1
kind: VCPORun
metadata: {name: countdown}
spec:
  model: {name: Qwen/Qwen2.5-1.5B}
  environment: {name: countdown}
  steps: 400
  algorithm: {maxPolicyLagSteps: 12}
  rollouts: [{name: main, minReplicas: 1, maxReplicas: 6}]
"""


def minimal_run() -> VCPORun:
    return parse_run("""
        metadata: {name: r}
        spec: {model: {name: m}, environment: {name: countdown}, steps: 3}
    """)


def test_a_run_that_fits_on_a_screen_is_accepted():
    spec = parse_run(ON_ONE_SCREEN).spec
    assert (spec.model.name, spec.environment.name) == ("Qwen/Qwen2.5-1.5B", "countdown")
    assert (spec.steps, spec.algorithm.max_policy_lag_steps) == (400, 12)
    assert [(group.name, group.max_replicas) for group in spec.rollouts] == [("main", 6)]


def test_version_and_kind_may_be_left_out():
    run = minimal_run()
    assert (run.api_version, run.kind) == (API_VERSION, KIND) == ("vcpo.dev/v1alpha1", "VCPORun")


def test_the_default_algorithm_is_the_papers_with_three_departures():
    algorithm = minimal_run().spec.algorithm
    config = algorithm.loss_config
    assert algorithm.method is Method.VCPO2
    assert (config.baseline, config.baseline_scope) == (Baseline.PESSIMISTIC, BaselineScope.BATCH)
    assert config.learning_rate_rule is LearningRateRule.TRUST_REGION
    assert (config.weight, config.weight_cap) == (Weight.SEQUENCE, 8.0)
    assert config.aggregation is Aggregation.SEQUENCE_MEAN
    assert algorithm.on_policy_ess_ratio is None


def test_the_default_fleet_is_one_worker_of_one_group():
    (group,) = minimal_run().spec.rollouts
    assert (group.name, group.min_replicas, group.max_replicas) == ("main", 1, 1)


def test_a_step_takes_prompts_times_trajectories():
    assert minimal_run().spec.batch.trajectories == 16 * 8


def test_json_is_read_like_yaml():
    text = '{"metadata": {"name": "r"}, "spec": {"model": {"name": "m"}, '
    text += '"environment": {"name": "countdown"}, "steps": 3}}'
    assert parse_run(text) == minimal_run()


def test_a_run_cannot_be_changed():
    run = minimal_run()
    with pytest.raises(ValidationError, match="frozen"):
        run.spec.steps = 4
