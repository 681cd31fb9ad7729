import dataclasses
from collections.abc import Callable

import pytest

from vcpo.api import VCPORun, parse_run
from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.records.step_record import StepRecord

_STEP = StepRecord(
    step=1,
    time_unix_s=1000.0,
    reward_mean=0.5,
    ess_ratio=0.6,
    on_policy_ess_ratio=0.8,
    learning_rate_scale=0.9,
    learning_rate=2.7e-4,
    gradient_norm=1.5,
    importance_weight_max=3.0,
    lag_mean=1.5,
    lag_p50=1,
    lag_max=4,
    response_tokens_mean=12.0,
    step_s=3.0,
    idle_s=1.0,
    tokens_per_s=200.0,
    lag_limit_steps=8,
    workers=2,
    leased=100,
    in_flight=30,
    buffered=20,
    consumed=45,
    dropped={"lag": 5},
)


@pytest.fixture
def run() -> VCPORun:
    """A run of 4 steps with lag limit 8 and ESS floor 0.1."""
    return parse_run("""
        apiVersion: vcpo.dev/v1alpha1
        kind: VCPORun
        metadata: {name: countdown}
        spec:
          model: {name: models/tiny}
          environment: {name: countdown}
          steps: 4
          algorithm: {maxPolicyLagSteps: 8}
          control: {essFloorRatio: 0.1}
          optimizer: {learningRate: 0.0003}
    """)


@pytest.fixture
def make_step() -> Callable[..., StepRecord]:
    """Build a healthy step (leased 100 = 30 + 20 + 45 + 5) with some fields changed."""
    return lambda step=1, **changes: dataclasses.replace(_STEP, step=step, **changes)


@pytest.fixture
def make_evaluation() -> Callable[..., EvaluationRecord]:
    return lambda step, accuracy, time_unix_s=1000.0: EvaluationRecord(
        step=step,
        time_unix_s=time_unix_s,
        accuracy=accuracy,
        num_prompts=128,
        num_trajectories=256,
        policy_version_min=step,
        policy_version_max=step,
    )


@pytest.fixture
def make_event() -> Callable[..., EventRecord]:
    return lambda message, time_unix_s=1000.0, kind="WorkerLost": EventRecord(
        time_unix_s=time_unix_s, source="host", kind=kind, message=message
    )
