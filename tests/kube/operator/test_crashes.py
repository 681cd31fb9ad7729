"""The operator killed at every one of its calls: whoever comes after it ends in the same place.

On the fake server only: about a hundred lives are lived, each on a server of its own.
"""

import pytest

from tests.fakes.kubernetes.faults import Effect, Fault
from tests.fixtures.operator.operator import USER_AGENT, operator_fixture, signals
from vcpo.wire.phase import RunPhase

TWO_GROUPS = [
    {"name": "main", "minReplicas": 1, "maxReplicas": 3},
    {"name": "more", "minReplicas": 1, "maxReplicas": 1},
]


async def live(operator):
    """A life in four turns: made, changed, made smaller, done. What is there after each."""
    states = []
    await operator.create()
    states.append(await settle(operator))
    operator.connections.signals = signals()
    await operator.edit(learner={"image": "learner:2"}, rollouts=TWO_GROUPS)
    states.append(await settle(operator))
    await operator.edit(rollouts=TWO_GROUPS[:1])
    states.append(await settle(operator))
    operator.connections.signals = signals(RunPhase.COMPLETE)
    states.append(await settle(operator))
    return states


async def settle(operator):
    await operator.settle_with_progress()
    return await operator.objects()


async def undisturbed_states():
    """A life without any failure, and its number of calls."""
    async with operator_fixture() as operator:
        states = await live(operator)
        calls = [each for each in operator.server.recorder if each.user_agent == USER_AGENT]
        return states, len(calls)


@pytest.mark.parametrize(
    ("effect", "times"),
    [
        pytest.param(Effect.DROP, None, id="before the call arrives"),
        pytest.param(Effect.LOSE_REPLY, 1, id="after the call, before its answer"),
    ],
)
async def test_killed_at_any_call_the_operator_ends_in_the_same_state(effect, times):
    states, num_calls = await undisturbed_states()
    assert num_calls > 30
    for position in range(num_calls):
        async with operator_fixture() as operator:
            fault = Fault(effect=effect, after=position, times=times, user_agent=USER_AGENT)
            operator.server.faults.add(fault)
            assert await live(operator) == states, f"killed at call {position}"
