import asyncio

import pytest

from tests.fixtures.rollout.worker import THREADS
from vcpo.wire.trajectory import FinishReason, TokenSpan, VersionSpan
from vcpo_rollout.engines.engine import Generation, GenerationRequest
from vcpo_rollout.generation.environment_pool import EnvironmentFailedError
from vcpo_rollout.generation.history import History
from vcpo_rollout.generation.multi_turn import converse

PROMPT = (3, 4)
END = 1


def turn(*token_ids, version=0, reason=FinishReason.STOP):
    return Generation(
        token_ids=token_ids,
        logprobs=tuple(-0.5 * token for token in token_ids),
        version_spans=(VersionSpan(policy_version=version, num_tokens=len(token_ids)),),
        finish_reason=reason,
    )


class Scripted:
    """An engine that says its turns, and remembers what it was asked."""

    def __init__(self, *turns):
        self.end_token_ids = frozenset({END})
        self.turns = list(turns)
        self.requests = []

    async def generate(self, request, *, interrupt=None):
        self.requests.append(request)
        return self.turns.pop(0)


class Letters:
    """A codec of one character per token, `a` for 10, `b` for 11."""

    def decode(self, token_ids, end_token_ids):
        return "".join(chr(ord("a") + each - 10) for each in token_ids if each not in end_token_ids)

    def encode_reply(self, text, last_token_id, end_token_ids):
        return tuple(ord(each) - ord("a") + 10 for each in text)


class Listener:
    """A conversation that gives its replies one after another, then ends."""

    def __init__(self, *replies, reward=1.0):
        self.replies = [*replies, None]
        self.turns = []
        self.worth = reward

    def next_turn(self, response):
        self.turns.append(response)
        return self.replies.pop(0)

    def reward(self):
        return self.worth


def hold(engine, conversation, *, room=100, codec=None):
    request = GenerationRequest(prompt_token_ids=PROMPT, temperature=1.0, max_new_tokens=room)
    return asyncio.run(
        converse(
            "lease/0",
            conversation,
            History(request=request),
            engine=engine,
            codec=codec or Letters(),
            threads=THREADS,
            interrupt=asyncio.Event(),
        )
    )


def test_every_turn_continues_the_very_tokens_before_it():
    engine = Scripted(turn(10, END), turn(11, 12, END), turn(13, END))
    listener = Listener("xy", "z")
    response = hold(engine, listener)
    assert [each.prompt_token_ids for each in engine.requests] == [
        PROMPT,
        (*PROMPT, 10, END, 33, 34),
        (*PROMPT, 10, END, 33, 34, 11, 12, END, 35),
    ]
    assert response.prompt_token_ids == PROMPT
    assert response.response_token_ids == (10, END, 33, 34, 11, 12, END, 35, 13, END)
    assert listener.turns == ["a", "bc", "d"]


def test_what_was_inserted_is_marked_and_has_neither_version_nor_probability():
    response = hold(Scripted(turn(10, END, version=4), turn(11, END, version=5)), Listener("xy"))
    assert response.inserted_spans == (TokenSpan(start=2, num_tokens=2),)
    assert response.rollout_logprobs == (-5.0, -0.5, -5.5, -0.5)
    assert [(span.policy_version, span.num_tokens) for span in response.version_spans] == [
        (4, 2),
        (5, 2),
    ]
    assert (response.reward, response.finish_reason) == (1.0, FinishReason.STOP)


def test_replies_take_up_room_too():
    engine = Scripted(turn(10, END), turn(11, END))
    hold(engine, Listener("xyz"), room=9)
    assert [each.max_new_tokens for each in engine.requests] == [9, 4]


def test_a_reply_that_leaves_no_room_is_dropped_and_ends_the_response():
    response = hold(Scripted(turn(10, END)), Listener("xyz"), room=5)
    assert (response.response_token_ids, response.inserted_spans) == ((10, END), ())
    assert response.finish_reason is FinishReason.LENGTH


def test_a_truncated_turn_is_passed_on_and_ends_the_response():
    listener = Listener("xyz")
    response = hold(Scripted(turn(10, 11, reason=FinishReason.LENGTH)), listener)
    assert response.finish_reason is FinishReason.LENGTH
    assert listener.turns == ["ab"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"next_turn": lambda _: 1 / 0}, "reply: ZeroDivisionError: division by zero"),
        ({"reward": lambda: 1 / 0}, "reward: ZeroDivisionError: division by zero"),
        ({"reward": lambda: "good"}, "type: .* must return a number, got str 'good'"),
        (
            {"reward": lambda: float("nan")},
            "non_finite: .* must return a finite number, got nan",
        ),
    ],
)
def test_what_the_environment_raises_is_a_typed_failure(change, said):
    listener = Listener()
    for name, replacement in change.items():
        setattr(listener, name, replacement)
    with pytest.raises(EnvironmentFailedError, match=said):
        hold(Scripted(turn(10, END)), listener)
