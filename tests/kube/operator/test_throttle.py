"""Why a run was throttled is told in the learner, the log, the event and the status, in one way."""

import logging

import pytest

from tests.fixtures.kubernetes.kubectl import kubectl, needs_kubectl
from tests.fixtures.operator.operator import operator_fixture, signals

REASON = "the ESS ratio is 25.0% of the on-policy ratio"


@pytest.fixture
async def operator(endpoint, caplog):
    """A run whose ESS is half of its floor."""
    async with operator_fixture(endpoint) as started:
        caplog.set_level(logging.INFO, logger="vcpo_operator")
        await started.create(algorithm={"maxPolicyLagSteps": 8}, control={"essFloorRatio": 0.5})
        await started.settle()
        started.connections.signals = signals(ess_ratio_mean=0.2)
        await started.reconcile()
        yield started


async def test_learner_log_and_status_have_the_reason_of_a_throttle(operator, caplog):
    assert operator.connections.throttles == [4]
    assert operator.connections.reasons == [REASON]
    logged = [record.getMessage() for record in caplog.get_records("setup")]
    assert any("Throttle" in line and REASON in line for line in logged)
    status = (await operator.run())["status"]
    decision = status["lastDecision"]
    assert {name: decision[name] for name in ("kind", "from", "to", "reason")} == {
        "kind": "Throttled",
        "from": 8,
        "to": 4,
        "reason": REASON,
    }
    assert status["admissionLagSteps"] == 4


async def test_an_operator_that_restarts_tells_a_learner_that_restarted_the_same_reason(operator):
    operator.restart_operator()
    operator.connections.signals = signals(ess_ratio_mean=None, step=0)
    await operator.reconcile()
    assert operator.connections.throttles == [4, 4]
    assert operator.connections.reasons == [REASON, REASON]


@needs_kubectl
async def test_kubectl_describe_shows_the_ess_share_of_a_throttle(operator, tmp_path):
    described = await kubectl(operator.backend, tmp_path, "describe", "vrun", "demo")
    (line,) = [line for line in described.splitlines() if "Throttled" in line and "Warning" in line]
    assert f"Lag limit 8 -> 4 versions: {REASON}." in line
