"""A prompt that can never fit is given up at once; neither engine nor worker is blamed for it."""

import asyncio

import pytest

from tests.fixtures.learner.dispatcher import dispatcher_fixture, work_request
from tests.fixtures.rollout.worker import FakeEngine, eventually, learner_fixture, run_in_task
from vcpo.wire.failures import Failure, FailureCause
from vcpo_learner.ledger.workers import TooManyFailuresError
from vcpo_rollout.engines.limits import RequestLimits
from vcpo_rollout.environments.environment import Prompt

CONTEXT_TOKENS = 4096
"""Prompts of 2 tokens and the default of `maxNewTokens` fit."""


class LimitedEngine(FakeEngine):
    """A fake engine with the checks of the real ones."""

    def __init__(self):
        super().__init__()
        self.limits = RequestLimits(vocabulary_size=100, context_tokens=CONTEXT_TOKENS)

    @property
    def context_tokens(self):
        return self.limits.context_tokens

    async def generate(self, request, *, interrupt=None):
        self.limits.check(request)
        return await super().generate(request, interrupt=interrupt)


class Texts:
    """Encodes a prompt as so many tokens as its text says."""

    def encode(self, prompt, *, max_tokens=None):
        num_tokens = int(prompt.text)
        return (3,) * (num_tokens if max_tokens is None else min(num_tokens, max_tokens))

    def decode(self, token_ids, end_token_ids):
        return ""


class Lengths:
    """A task whose prompts have these numbers of tokens, and then 2."""

    def __init__(self, *lengths):
        self.lengths = lengths

    def prompt(self, split, index):
        length = self.lengths[index] if index < len(self.lengths) else 2
        return Prompt(text=str(length), answer="")

    def reward(self, prompt, response):
        return 1.0


def use(fixture, environment):
    fixture.engine, fixture.codec = LimitedEngine(), Texts()
    fixture.environment = environment


@pytest.mark.parametrize(
    "unusable",
    [(CONTEXT_TOKENS,) * 40, (0,) * 4],  # after eight failures an engine is at fault
    ids=["too long", "empty"],
)
async def test_no_number_of_unusable_prompts_ends_the_worker(unusable):
    async with learner_fixture(
        algorithm={"maxPolicyLagSteps": 100},
        steps=100,
        failurePolicy={"maxFailuresInARow": 1000},
    ) as fixture:
        use(fixture, Lengths(*unusable))
        fixture.publish(0)
        async with run_in_task(fixture.worker()) as task:
            await eventually(lambda: fixture.samples("accepted") >= 8 or task.done())
            assert not task.done()


async def test_a_prompt_that_is_too_long_is_given_up_at_once_and_counted_by_reason():
    async with learner_fixture() as fixture:
        use(fixture, Lengths(2, CONTEXT_TOKENS, CONTEXT_TOKENS))
        fixture.publish(0)
        async with run_in_task(fixture.worker()):
            await eventually(lambda: fixture.samples("accepted") >= 8)
        counts = fixture.ledger.counts()
        counts.check()
        assert counts.dropped["prompt_too_long"] == 4  # two prompts of two responses, leased once
        assert "generation_failed" not in counts.dropped
        assert fixture.count("vcpo_rollout_failures_total", cause="too_long") == 2
        (told,) = fixture.dispatcher.failures.counts
    said = f"max_new_tokens: 1024 after a prompt of {CONTEXT_TOKENS} exceeds the model's context"
    assert said in told.latest.message
    assert "lower spec.sampling.maxNewTokens or shorten the prompts" in told.latest.message


async def test_a_prompt_that_is_too_long_is_shortened_and_answered_where_the_run_says_so():
    environment = {"name": "sort_digits", "overlongPrompts": "truncate"}
    async with learner_fixture(environment=environment) as fixture:
        use(fixture, Lengths(2, CONTEXT_TOKENS, CONTEXT_TOKENS))
        fixture.publish(0)
        async with run_in_task(fixture.worker()):
            await eventually(lambda: fixture.samples("accepted") >= 8)
        assert "prompt_too_long" not in fixture.ledger.counts().dropped


def too_long(fixture, assignment):
    message = "max_new_tokens: 8 after a prompt of 600 exceeds the model's context of 512 tokens"
    failure = Failure(cause=FailureCause.TOO_LONG, message=message)
    fixture.dispatcher.fail("w", assignment.lease_id, failure)


async def give_up_prompts(fixture, number, *, every_s):
    for _ in range(number):
        (assignment,) = await fixture.dispatcher.lease(work_request(room=2), wait_s=0.0)
        too_long(fixture, assignment)
        fixture.dispatcher.failures.check()
        fixture.clock.advance(every_s)


async def test_a_run_whose_first_prompts_are_too_long_goes_on_and_nobody_is_set_aside():
    fixture = dispatcher_fixture(failurePolicy={"maxFailuresInARow": 4})
    await give_up_prompts(fixture, 100, every_s=5.0)  # less than is tolerated, 600 s
    assert fixture.dispatcher.failures.in_a_row == 100
    assert not fixture.dispatcher.registry.latest_set_aside
    (assignment,) = await fixture.dispatcher.lease(work_request(room=2), wait_s=0.0)
    assert assignment.prompt_index == 100
    fixture.submit(assignment)
    assert fixture.dispatcher.failures.in_a_row == 0


async def test_a_run_all_of_whose_prompts_are_too_long_ends_with_the_field_the_value_and_the_cure():
    fixture = dispatcher_fixture(failurePolicy={"maxFailuresInARow": 4})
    said = (
        r"^\d+ prompts of environment 'sort_digits' in 600 s do not fit into the model's context,"
        r" and none did; the last one: max_new_tokens: 8 after a prompt of 600 exceeds"
    )
    with pytest.raises(TooManyFailuresError, match=said):
        await give_up_prompts(fixture, 100, every_s=60.0)


async def test_a_run_that_shall_have_no_such_prompt_ends_at_the_first():
    fixture = dispatcher_fixture(environment={"name": "sort_digits", "overlongPrompts": "fail"})
    said = (
        r"^a prompt of environment 'sort_digits' does not fit into the model's context:"
        r" max_new_tokens: 8 after a prompt of 600 .* spec\.environment\.overlongPrompts is 'fail'"
    )
    with pytest.raises(TooManyFailuresError, match=said):
        await give_up_prompts(fixture, 1, every_s=0.0)


async def test_other_failures_between_them_still_end_the_run_and_are_counted_apart():
    fixture = dispatcher_fixture(failurePolicy={"maxFailuresInARow": 4})
    broken = Failure(cause=FailureCause.REWARD, message="no")
    for number in range(8):
        fixture.dispatcher.failures.check()
        (assignment,) = await fixture.dispatcher.lease(work_request(room=2), wait_s=0.0)
        if number % 2:
            fixture.dispatcher.fail("w", assignment.lease_id, broken)
        else:
            too_long(fixture, assignment)
    with pytest.raises(TooManyFailuresError, match=r"^4 generations in a row failed, .*4 of them"):
        fixture.dispatcher.failures.check()


async def test_a_held_out_prompt_that_is_too_long_is_not_granted_again():
    fixture = dispatcher_fixture(evaluation={"prompts": 2, "everySteps": 100})
    round_ = asyncio.create_task(fixture.dispatcher.evaluate(0, exclusive=True))
    await asyncio.sleep(0)
    first, second = await fixture.dispatcher.lease(work_request(room=2), wait_s=0.0)
    too_long(fixture, first)
    fixture.submit(second)
    result = await round_
    assert result is not None
    assert result.record.num_trajectories == 1
