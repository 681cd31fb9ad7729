"""The operator killed at every one of its calls: whoever comes after it ends in the same place.

On the fake server only: about a hundred lives are lived, each on a server of its own. A life is one
turn of a run's life, from what an undisturbed operator left behind by then.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.faults import Effect, Fault
from tests.fixtures.operator.operator import USER_AGENT, operator_fixture, signals
from vcpo.wire.phase import RunPhase

TWO_GROUPS = [
    {"name": "main", "minReplicas": 1, "maxReplicas": 3},
    {"name": "more", "minReplicas": 1, "maxReplicas": 1},
]


async def make(operator):
    await operator.create()


async def change(operator):
    operator.connections.signals = signals()
    await operator.edit(learner={"image": "learner:2"}, rollouts=TWO_GROUPS)


async def make_smaller(operator):
    operator.connections.signals = signals()
    await operator.edit(rollouts=TWO_GROUPS[:1])


async def complete(operator):
    operator.connections.signals = signals(RunPhase.COMPLETE)


@dataclass(frozen=True)
class Turn:
    """What a turn does, on what, the number of the operator's calls in it, and what is then there.

    now_s: the operator's time at its start.
    """

    do: Any
    held: Api
    now_s: float
    num_calls: int
    state: Any


async def live(operator, do):
    """Live one turn, with an operator that remembers nothing before it."""
    operator.restart_operator()
    await do(operator)
    await operator.settle_with_progress()
    return await operator.objects()


async def undisturbed_turns():
    """A life without any failure, in four turns."""
    turns = []
    async with operator_fixture() as operator:
        for do in (make, change, make_smaller, complete):
            held, now_s = operator.server.api.copy(), operator.now_s
            operator.server.recorder.clear()
            state = await live(operator, do)
            calls = [each for each in operator.server.recorder if each.user_agent == USER_AGENT]
            turns.append(Turn(do=do, held=held, now_s=now_s, num_calls=len(calls), state=state))
    return turns


@pytest.mark.parametrize(
    ("effect", "times"),
    [
        pytest.param(Effect.DROP, None, id="before the call arrives"),
        pytest.param(Effect.LOSE_REPLY, 1, id="after the call, before its answer"),
    ],
)
async def test_killed_at_any_call_the_operator_ends_in_the_same_state(effect, times):
    turns = await undisturbed_turns()
    assert sum(turn.num_calls for turn in turns) > 30
    for turn in turns:
        for position in range(turn.num_calls):
            async with operator_fixture(held=turn.held.copy()) as operator:
                operator.now_s = turn.now_s
                fault = Fault(effect=effect, after=position, times=times, user_agent=USER_AGENT)
                operator.server.faults.add(fault)
                state = await live(operator, turn.do)
                assert fault.seen > position
                assert state == turn.state, f"{turn.do.__name__}: killed at call {position}"
