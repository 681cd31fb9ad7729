"""Conversations, and those that one worker interrupts and another resumes."""

import asyncio
import itertools
import threading

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.rollout.worker import THREADS, counts, eventually, learner_fixture, run_in_task
from vcpo.wire.trajectory import (
    FinishReason,
    PartialResponse,
    TokenSpan,
    VersionSpan,
    partial_from_message,
    partial_to_message,
)
from vcpo.wire.v1 import work_pb2
from vcpo_rollout.engines.engine import Generation, GenerationInterruptedError, GenerationRequest
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.environments import Prompt
from vcpo_rollout.generation.environment_pool import EnvironmentFailedError
from vcpo_rollout.generation.history import Endings, History, Turn, replied_turns
from vcpo_rollout.generation.multi_turn import converse, resume

PROMPT = (3, 4)
END = 1
ENDS = frozenset({END})
ENDINGS = Endings(token_ids=ENDS)
FIRST_INSERTED = 100
"""Tokens from here on are the environment's."""


def versions(*spans):
    return tuple(VersionSpan(policy_version=version, num_tokens=size) for version, size in spans)


class Characters:
    """A tokenizer of one character per token."""

    clean_up_tokenization_spaces = False

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(map(chr, token_ids))


def encoded(text):
    return tuple(map(ord, text))


class Letters:
    """A codec of one character per token."""

    def decode(self, token_ids, end_token_ids):
        return "".join(chr(token) for token in token_ids if token not in end_token_ids)

    def encode_reply(self, text, last_token_id, end_token_ids):
        return tuple(FIRST_INSERTED + int(digit) for digit in text)


class Reciting:
    """An engine that generates one fixed text from any position; interrupted after some tokens.

    Version and log-probability of a token follow from its position among the sampled tokens.
    """

    def __init__(self, turns, *, num_tokens=1 << 30, version=lambda position: position // 3):
        self.end_token_ids = ENDS
        self.text = [token for turn in turns for token in (*turn, END)]
        self.num_tokens = num_tokens
        self.version = version

    async def generate(self, request, *, interrupt=None):
        position = sum(token < FIRST_INSERTED for token in request.prompt_token_ids) - len(PROMPT)
        partial = request.partial_response
        token_ids = list(partial.token_ids if partial else ())
        while END not in token_ids and len(token_ids) < request.max_new_tokens:
            if self.num_tokens == 0:
                raise GenerationInterruptedError(
                    self.partial_response(position, token_ids) if token_ids else None
                )
            self.num_tokens -= 1
            token_ids.append(self.text[position + len(token_ids)])
        sampled = self.partial_response(position, token_ids)
        if partial:  # it resumes from these very numbers and does not compute them again
            assert sampled.logprobs[: len(partial.logprobs)] == partial.logprobs
        reason = FinishReason.STOP if token_ids[-1] == END else FinishReason.LENGTH
        return Generation(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            version_spans=sampled.version_spans,
            finish_reason=reason,
        )

    def partial_response(self, position, token_ids):
        spans = []
        for version in map(self.version, range(position, position + len(token_ids))):
            size = spans.pop()[1] if spans and spans[-1][0] == version else 0
            spans.append((version, size + 1))
        return PartialResponse(
            token_ids=tuple(token_ids),
            logprobs=tuple(-0.5 * each for each in range(position, position + len(token_ids))),
            version_spans=versions(*spans),
        )


class Lengths:
    """A conversation that replies with the length of each turn, and ends after some turns.

    Its reply to a turn of three letters is empty, and the conversation continues.
    """

    def __init__(self, num_turns):
        self.num_turns = num_turns
        self.turns = []

    def next_turn(self, response):
        self.turns.append(response)
        if len(self.turns) == self.num_turns:
            return None
        return "" if len(response) == 3 else str(len(response)) * (1 + len(response))

    def reward(self):
        return float(len(self.turns))


def request_of(room=1000):
    return GenerationRequest(prompt_token_ids=PROMPT, temperature=1.0, max_new_tokens=room)


async def converse_with(conversation, history, engine, interrupt=None):
    return await converse(
        "lease/0",
        conversation,
        history,
        engine=engine,
        codec=Letters(),
        threads=THREADS,
        interrupt=interrupt or asyncio.Event(),
    )


async def interrupt_after(num_tokens, turns, conversation, history):
    """The partial response of an engine interrupted after so many tokens, off the wire."""
    with pytest.raises(GenerationInterruptedError) as caught:
        await converse_with(conversation, history, Reciting(turns, num_tokens=num_tokens))
    partial = caught.value.partial_response
    if partial is None:
        return None
    sent = partial_to_message(partial).SerializeToString()
    return partial_from_message(work_pb2.PartialResponse.FromString(sent), path="begun[0]")


async def resume_from(partial, turns, room=1000):
    begin = lambda: Lengths(len(turns))  # noqa: E731 - as short as it is
    return await resume(
        begin, request_of(room), partial, codec=Letters(), endings=ENDINGS, threads=THREADS
    )


TURNS = [(10, 11), (12,), (13, 14, 15, 16)]
"""Replies: `222` and `11`; so the whole is 10 11 1 102 102 102 12 1 101 101 13 14 15 16 1."""


async def test_a_conversation_interrupted_in_the_middle_of_a_turn_releases_its_tokens():
    partial = await interrupt_after(4, TURNS, Lengths(3), History(request=request_of()))
    assert partial == PartialResponse(
        token_ids=(10, 11, END, 102, 102, 102, 12),
        logprobs=(0.0, -0.5, -1.0, -1.5),
        version_spans=versions((0, 3), (1, 1)),
        inserted_spans=(TokenSpan(start=3, num_tokens=3),),
    )


@given(
    turns=st.lists(st.lists(st.integers(10, 99), max_size=4).map(tuple), min_size=1, max_size=5),
    room=st.integers(1, 40),
    data=st.data(),
)
def test_a_conversation_interrupted_anywhere_any_number_of_times_is_the_same_as_uninterrupted(
    turns, room, data
):
    asyncio.run(check_resumed(turns, room, data))


async def check_resumed(turns, room, data):
    whole = await converse_with(
        Lengths(len(turns)), History(request=request_of(room)), Reciting(turns)
    )
    num_sampled = whole.num_sampled_tokens
    at = sorted(data.draw(st.lists(st.integers(0, num_sampled - 1), max_size=3)))
    conversation, history = Lengths(len(turns)), History(request=request_of(room))
    for num_tokens in map(int.__sub__, at, [0, *at]):
        partial = await interrupt_after(num_tokens, turns, conversation, history)
        if partial is None:
            conversation, history = Lengths(len(turns)), History(request=request_of(room))
        else:
            assert len(partial.token_ids) < room
            conversation, history = await resume_from(partial, turns, room)
    assert await converse_with(conversation, history, Reciting(turns)) == whole


def test_a_stop_string_divides_turns_as_an_end_token_does():
    # The codec writes a token as its character: `)` completes the string and is sampled.
    endings = Endings(token_ids=ENDS, stop_strings=StopStrings(Characters(), ["!)"]))
    call, reply, rest = map(encoded, ("a!)", "x", "b!"))

    def partial_of(*parts, inserted_spans=()):
        token_ids = tuple(itertools.chain(*parts))
        num_sampled = len(token_ids) - sum(span.num_tokens for span in inserted_spans)
        return PartialResponse(
            token_ids=token_ids,
            logprobs=(-0.5,) * num_sampled,
            version_spans=versions((0, num_sampled)),
            inserted_spans=inserted_spans,
        )

    def resumed(partial):
        turns = replied_turns(partial, endings)
        return turns, History.resume(request_of(), partial, turns, endings).open_turn

    # Its reply was empty, and the next turn is not ended.
    turns, open_turn = resumed(partial_of(call, rest))
    assert turns == [Turn(sampled=call, inserted=())]
    assert (open_turn.token_ids, open_turn.finish_reason) == (rest, None)
    # A turn after a reply that waits for its own.
    span = TokenSpan(start=len(call), num_tokens=len(reply))
    turns, open_turn = resumed(partial_of(call, reply, call, inserted_spans=(span,)))
    assert turns == [Turn(sampled=call, inserted=reply)]
    assert (open_turn.token_ids, open_turn.finish_reason) == (call, FinishReason.STOP)
    # A string does not go on over a reply.
    turns, open_turn = resumed(
        partial_of(rest, reply, encoded(")"), inserted_spans=(TokenSpan(start=2, num_tokens=1),))
    )
    assert turns == [Turn(sampled=rest, inserted=reply)]
    assert open_turn.finish_reason is None


async def test_a_complete_conversation_is_replayed_and_judged():
    whole = await converse_with(Lengths(3), History(request=request_of()), Reciting(TURNS))
    partial = PartialResponse(
        token_ids=whole.response_token_ids,
        logprobs=whole.rollout_logprobs,
        version_spans=whole.version_spans,
        finish_reason=whole.finish_reason,
        inserted_spans=whole.inserted_spans,
    )
    conversation, history = await resume_from(partial, TURNS)
    silent = Reciting((), num_tokens=0)
    assert await converse_with(conversation, history, silent) == whole


async def test_a_conversation_whose_environment_replies_differently_is_not_resumed():
    partial = await interrupt_after(4, TURNS, Lengths(3), History(request=request_of()))
    # It would say `33` to the first turn, or nothing because it ends there.
    longer = lambda: type("Longer", (Lengths,), {"next_turn": lambda *_: "33"})(3)  # noqa: E731
    for begin in (longer, lambda: Lengths(1)):
        assert (
            await resume(
                begin, request_of(), partial, codec=Letters(), endings=ENDINGS, threads=THREADS
            )
            is None
        )


async def test_a_slow_reply_does_not_delay_the_interrupt():
    released, interrupt = threading.Event(), asyncio.Event()
    replying, loop = asyncio.Event(), asyncio.get_running_loop()

    class Slow(Lengths):
        def next_turn(self, response):
            loop.call_soon_threadsafe(replying.set)
            released.wait()
            return super().next_turn(response)

    holding = asyncio.create_task(
        converse_with(Slow(3), History(request=request_of()), Reciting(TURNS), interrupt)
    )
    try:
        await replying.wait()
        interrupt.set()
        with pytest.raises(GenerationInterruptedError) as caught:
            await holding
    finally:
        released.set()
    assert caught.value.partial_response.token_ids == (10, 11, END)
    # The environment has not replied to that turn, so the resumed conversation replays it.
    conversation, history = await resume_from(caught.value.partial_response, TURNS)
    assert conversation.turns == []
    whole = await converse_with(Lengths(3), History(request=request_of()), Reciting(TURNS))
    assert await converse_with(conversation, history, Reciting(TURNS)) == whole


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


def hold(engine, conversation, *, room=100):
    history = History(request=request_of(room))
    return asyncio.run(converse_with(conversation, history, engine))


def test_every_turn_continues_the_very_tokens_before_it():
    engine = Scripted(turn(10, END), turn(11, 12, END), turn(13, END))
    listener = Listener("12", "3")
    response = hold(engine, listener)
    assert [each.prompt_token_ids for each in engine.requests] == [
        PROMPT,
        (*PROMPT, 10, END, 101, 102),
        (*PROMPT, 10, END, 101, 102, 11, 12, END, 103),
    ]
    assert response.prompt_token_ids == PROMPT
    assert response.response_token_ids == (10, END, 101, 102, 11, 12, END, 103, 13, END)
    assert listener.turns == [chr(10), chr(11) + chr(12), chr(13)]


def test_what_was_inserted_is_marked_and_has_neither_version_nor_probability():
    response = hold(Scripted(turn(10, END, version=4), turn(11, END, version=5)), Listener("12"))
    assert response.inserted_spans == (TokenSpan(start=2, num_tokens=2),)
    assert response.rollout_logprobs == (-5.0, -0.5, -5.5, -0.5)
    assert [(span.policy_version, span.num_tokens) for span in response.version_spans] == [
        (4, 2),
        (5, 2),
    ]
    assert (response.reward, response.finish_reason) == (1.0, FinishReason.STOP)


def test_replies_take_up_room_too():
    engine = Scripted(turn(10, END), turn(11, END))
    hold(engine, Listener("123"), room=9)
    assert [each.max_new_tokens for each in engine.requests] == [9, 4]


def test_a_reply_that_leaves_no_room_is_dropped_and_ends_the_response():
    response = hold(Scripted(turn(10, END)), Listener("123"), room=5)
    assert (response.response_token_ids, response.inserted_spans) == ((10, END), ())
    assert response.finish_reason is FinishReason.LENGTH


def test_a_truncated_turn_is_passed_on_and_ends_the_response():
    listener = Listener("123")
    response = hold(Scripted(turn(10, 11, reason=FinishReason.LENGTH)), listener)
    assert response.finish_reason is FinishReason.LENGTH
    assert listener.turns == [chr(10) + chr(11)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"next_turn": lambda _: 1 / 0}, "reply: ZeroDivisionError: division by zero"),
        ({"reward": lambda: 1 / 0}, "reward: ZeroDivisionError: division by zero"),
        ({"reward": lambda: "good"}, "type: .* must return a number, got str 'good'"),
    ],
)
def test_what_the_environment_raises_is_a_typed_failure(change, said):
    listener = Listener()
    for name, replacement in change.items():
        setattr(listener, name, replacement)
    with pytest.raises(EnvironmentFailedError, match=said):
        hold(Scripted(turn(10, END)), listener)


class Echo:
    """An environment whose every response takes two turns."""

    def prompt(self, split, index):
        return Prompt(text=f"{split} {index}", answer="")

    def reward(self, prompt, response):
        raise NotImplementedError

    def converse(self, prompt):
        return Listener("x", reward=0.5)


@pytest_asyncio.fixture
async def fixture():
    """A learner; its worker's engine says 5 and the end each time, the codec makes 7 of a reply."""
    async with learner_fixture() as fixture:
        fixture.environment = Echo()
        fixture.publish(0)
        yield fixture


async def shut_down_in_second_turns(fixture):
    """Shut a worker down while both responses of a prompt are in their second turn."""
    fixture.engine.gate.clear()
    fixture.engine.quick = 2
    worker = fixture.worker(places=2, drain_s=0.01)
    async with run_in_task(worker) as task:
        await eventually(lambda: fixture.engine.sampling == 2 and len(fixture.engine.requests) == 4)
        worker.shut_down()
        await task
    assert counts(fixture).dropped == {"released": 2}
    fixture.engine.requests.clear()


async def test_another_worker_resumes_a_conversation_of_a_worker_that_shut_down(fixture):
    await shut_down_in_second_turns(fixture)
    fixture.publish(1)
    fixture.engine.gate.set()
    async with run_in_task(fixture.worker(places=2, learner=fixture.client_for("another"))):
        await eventually(lambda: counts(fixture).buffered == 8)
    resumed = fixture.engine.requests[:2]
    assert [one.prompt_token_ids for one in resumed] == [(3, 4, 5, 1, 7)] * 2
    assert [one.partial_response.token_ids for one in resumed] == [(5,)] * 2
    group, *_ = fixture.ledger.take_batch(step=1, max_policy_lag_steps=1)
    for one in group.trajectories:
        assert one.response_token_ids == (5, 1, 7, 5, 1)
        assert one.inserted_spans == (TokenSpan(start=2, num_tokens=1),)
        assert one.rollout_logprobs == (-0.5, -0.25, -0.5, -0.25)
        spans = [(span.policy_version, span.num_tokens) for span in one.version_spans]
        assert spans == [(0, 1), (0, 1), (0, 1), (1, 1)]
        assert one.reward == 0.5
