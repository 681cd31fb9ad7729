"""An API server that fails the operator's calls: trouble is told, and gone when the fault is.

On the fake server only: a real one does not fail by script.
"""

import pytest

from tests.fakes.kubernetes.faults import Fault, broken, overloaded, stale, unavailable
from tests.fixtures.operator.operator import ON_THE_FAKE, operator_fixture

CALLS = [
    ("get", "configmaps"),
    ("get", "secrets"),
    ("patch", "statefulsets"),
    ("patch", "deployments"),
    ("patch", "vcporuns"),
]


pytestmark = ON_THE_FAKE


@pytest.fixture
async def operator(operator):
    await operator.create()
    return operator


@pytest.mark.parametrize(
    ("error", "verb", "resource"),
    [
        *(pytest.param(broken(), *call, id=f"500 {' '.join(call)}") for call in CALLS),
        *(
            pytest.param(error, "patch", "deployments", id=f"{error.code} patch deployments")
            for error in (stale(), overloaded(), unavailable())
        ),
    ],
)
async def test_a_refused_call_is_trouble_and_made_again(operator, error, verb, resource):
    operator.server.faults.add(Fault(error=error, verb=verb, resource=resource))
    outcome = await operator.reconcile()
    assert str(error.code) in outcome.error
    await operator.settle_with_progress()
    async with operator_fixture() as undisturbed:
        await undisturbed.create()
        await undisturbed.settle_with_progress()
        assert await operator.objects() == await undisturbed.objects()


async def test_a_lost_event_is_no_trouble(operator):
    operator.server.faults.add(Fault(error=broken(), verb="create", resource="events", times=None))
    await operator.settle()
    await operator.edit(suspend=True)
    assert not (await operator.reconcile()).error
