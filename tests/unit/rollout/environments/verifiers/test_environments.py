"""Environments of the verifiers library, driven by our loop: turns, ends, tools, rewards."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.fixtures.rollout.worker import THREADS
from vcpo.wire.trajectory import FinishReason, VersionSpan
from vcpo_rollout.engines.engine import Generation, GenerationInterruptedError, GenerationRequest
from vcpo_rollout.environments import Split, make_environment
from vcpo_rollout.environments.verifiers.environments import ModelCalledError
from vcpo_rollout.environments.verifiers.messages import reply_text, to_prompt
from vcpo_rollout.generation.history import Endings, History
from vcpo_rollout.generation.multi_turn import converse, resume

END = 0
ENDS = frozenset({END})


@pytest.fixture
def game(monkeypatch):
    """An environment of `number_games.py`, found as an installed package would be."""
    monkeypatch.syspath_prepend(Path(__file__).parent)

    def make(kind="guessing", **arguments):
        return make_environment(
            "verifiers:number-games", {"arguments": {"kind": kind, **arguments}}, 0
        )

    return make


def prompt_of(environment, number, split=Split.TRAIN):
    """The prompt whose answer is `number`."""
    for index in range(40):
        prompt = environment.prompt(split, index)
        if prompt.text.endswith(f"Think of {number}."):
            return prompt
    raise LookupError(number)


def test_a_prompt_has_its_system_message_before_it(game):
    assert prompt_of(game(), 7).text == "Play.\n\nThink of 7."


def test_a_single_turn_is_judged_by_the_rubric(game):
    single = game("single")
    prompt = prompt_of(single, 7)
    assert single.reward(prompt, "It is 7 , surely") == 2.0 - 0.25
    assert single.reward(prompt, "It is 8") == -0.25
    assert single.converse(prompt).next_turn("7") is None


def test_the_environment_replies_until_its_stop_condition(game):
    guessing = game()
    exchange = guessing.converse(prompt_of(guessing, 7))
    assert exchange.next_turn("3") == "Too low, 1 so far."
    assert exchange.next_turn("9") == "Too high, 2 so far."
    assert exchange.next_turn("7") is None
    assert exchange.reward() == 2.0 - 0.75


def test_an_environment_may_end_with_words_that_nobody_answers(game):
    guessing = game()
    exchange = guessing.converse(prompt_of(guessing, 7))
    assert exchange.next_turn("-1") is None
    assert exchange.reward() == -0.25


def test_turns_are_bounded_by_the_environment(game):
    guessing = game(max_turns=2)
    exchange = guessing.converse(prompt_of(guessing, 7))
    assert [exchange.next_turn("3"), exchange.next_turn("3")] == ["Too low, 1 so far.", None]


def test_conversations_are_cleaned_up_once_however_they_end(game):
    guessing = game()
    stopped, cut_off = (guessing.converse(prompt_of(guessing, 7)) for _ in range(2))
    stopped.next_turn("7")
    stopped.reward()
    cut_off.next_turn("3")
    cut_off.reward()
    assert (stopped._state["ends"], cut_off._state["ends"]) == (1, 1)
    assert (stopped._state["is_truncated"], cut_off._state["is_truncated"]) == (False, True)


def test_tools_are_described_called_and_answered_in_the_text(game):
    tools = game("tools")
    prompt = prompt_of(tools, 7)
    assert prompt.text.startswith("Play.\n\nYou may call functions")
    assert '"name": "add", "description": "Add two numbers."' in prompt.text
    assert prompt.text.endswith("</tool_call>\n\nThink of 7.")
    exchange = tools.converse(prompt)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    assert exchange.next_turn(f"Let me see. {call}") == "<tool_response>\n7\n</tool_response>"
    assert exchange.next_turn("It is 7") is None
    assert exchange.reward() == 2.0 - 0.5


def test_two_calls_are_answered_in_their_order_and_a_failing_one_by_its_error(game):
    tools = game("tools")
    exchange = tools.converse(prompt_of(tools, 7))
    calls = (
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
        '<tool_call>{"name": "divide", "arguments": {}}</tool_call>'
    )
    assert exchange.next_turn(calls) == (
        "<tool_response>\n2\n</tool_response>\n<tool_response>\n'divide'\n</tool_response>"
    )


@pytest.mark.parametrize("text", ["no call", "<tool_call>add 1 2</tool_call>", "<tool_call>[1]"])
def test_what_is_no_call_ends_the_conversation(game, text):
    tools = game("tools")
    assert tools.converse(prompt_of(tools, 7)).next_turn(text) is None


def test_every_prompt_is_in_one_split(game):
    guessing = game()
    train, evaluation = (
        {guessing.prompt(split, index).text for index in range(40)} for split in Split
    )
    assert len(train) + len(evaluation) == 40
    assert evaluation
    assert not train & evaluation


def test_a_data_set_for_evaluation_is_kept_and_not_trained_on(game):
    guessing = game(evaluation=3)
    texts = {split: {guessing.prompt(split, index).text for index in range(40)} for split in Split}
    assert texts[Split.EVALUATION] == {f"Play.\n\nThink of {number}." for number in (1, 2, 3)}
    assert len(texts[Split.TRAIN]) == 37


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "sandbox"}, "runs outside of the worker (SandboxEnv); use one that replies"),
        ({"kind": "own_server"}, "calls the model itself (get_model_response); use one that"),
        ({"kind": "mixture"}, "is a EnvGroup and not a MultiTurnEnv; use one that replies"),
        ({"kind": "group"}, "judges the responses of a group together (together); use one that"),
        (
            {"few_shot": [{"role": "tool", "content": "7"}]},
            "a prompt has a message of the role 'tool' or a tool call; only text messages of",
        ),
        ({"kind": "nothing"}, "cannot be loaded with the arguments {'kind': 'nothing'} (Runt"),
    ],
    ids=["sandbox", "own server", "mixture", "group", "few shot", "arguments"],
)
def test_what_cannot_be_driven_is_refused_with_the_cure(game, arguments, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is compared
        game(**arguments)
    assert str(caught.value).startswith("environment.name: ")
    assert said in str(caught.value)


def test_examples_in_the_models_name_are_messages_of_the_prompt(game):
    examples = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "7"}]
    prompt = game(few_shot=examples).prompt(Split.TRAIN, 0)
    assert [message["role"] for message in prompt.messages] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert prompt.text.startswith("Play.\n\nGuess.\n\n7\n\nThink of ")


def test_tools_are_described_in_the_system_message():
    prompt = to_prompt([{"role": "user", "content": "add"}], [{"name": "adder"}], answer="")
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert '{"name": "adder"}' in prompt.messages[0]["content"]
    assert prompt.text == "\n\n".join(message["content"] for message in prompt.messages)


PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("as it is", "as it is"),
        ([{"role": "user", "content": "one"}, {"role": "system", "content": "two"}], "one\ntwo"),
        ([{"role": "user", "content": [{"type": "text", "text": "a part"}]}], "a part"),
        ([{"role": "tool", "content": None}], "<tool_response>\n\n</tool_response>"),
    ],
)
def test_a_reply_is_its_text(messages, text):
    assert reply_text(messages) == text


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [PICTURE]}, "has content other than text"),
        ({"role": "assistant", "content": "I think"}, "an assistant message"),
    ],
)
def test_a_reply_that_cannot_be_encoded_is_a_failure(message, said):
    with pytest.raises(ValueError, match=said):
        reply_text([message])


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="the environment 'nothing-of-the-kind' cannot be loaded"):
        make_environment("verifiers:nothing-of-the-kind", {}, 0)


def test_an_environment_that_calls_a_model_by_itself_says_so(game):
    asking = game("asking")
    exchange = asking.converse(prompt_of(asking, 7))
    with pytest.raises(ModelCalledError, match=r"calls a model itself \(client.chat\)"):
        exchange.next_turn("3")


def test_an_environment_that_rewrites_what_was_sampled_is_a_failure(game):
    rewriting = game("rewriting")
    exchange = rewriting.converse(prompt_of(rewriting, 7))
    with pytest.raises(ValueError, match="changes earlier turns"):
        exchange.next_turn("3")


def test_the_signals_of_the_process_are_left_alone(game):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    game()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


class Characters:
    """A codec of one token per character."""

    def decode(self, token_ids, end_token_ids):
        return "".join(chr(token) for token in token_ids if token not in end_token_ids)

    def encode_reply(self, text, last_token_id, end_token_ids):
        return tuple(map(ord, text))


class Saying:
    """An engine that says its turns, and is cut when it has no more."""

    end_token_ids = ENDS

    def __init__(self, *turns):
        self.turns = list(turns)
        self.prompts = []

    async def generate(self, request, *, interrupt=None):
        self.prompts.append("".join(map(chr, request.prompt_token_ids)))
        if not self.turns:
            raise GenerationInterruptedError(None)
        token_ids = (*map(ord, self.turns.pop(0)), END)
        return Generation(
            token_ids=token_ids,
            logprobs=(-0.5,) * len(token_ids),
            version_spans=(VersionSpan(policy_version=0, num_tokens=len(token_ids)),),
            finish_reason=FinishReason.STOP,
        )


async def hold(conversation, history, engine):
    return await converse(
        "lease/0",
        conversation,
        history,
        engine=engine,
        codec=Characters(),
        threads=THREADS,
        interrupt=asyncio.Event(),
    )


async def test_the_history_is_token_by_token_and_continues_after_an_interrupt(game):
    guessing = game()
    prompt = prompt_of(guessing, 7)
    request = GenerationRequest(
        prompt_token_ids=tuple(map(ord, prompt.text)), temperature=1.0, max_new_tokens=500
    )
    engine = Saying("3", "9", "7")
    whole = await hold(guessing.converse(prompt), History(request=request), engine)
    said = "3\0Too low, 1 so far.9\0Too high, 2 so far."
    assert engine.prompts[-1] == prompt.text + said
    assert "".join(map(chr, whole.response_token_ids)) == said + "7\0"
    assert whole.reward == 2.0 - 0.75
    assert whole.num_sampled_tokens == 6

    with pytest.raises(GenerationInterruptedError) as caught:
        await hold(guessing.converse(prompt), History(request=request), Saying("3", "9"))
    conversation, history = await resume(
        lambda: guessing.converse(prompt),
        request,
        caught.value.partial_response,
        codec=Characters(),
        endings=Endings(token_ids=ENDS),
        threads=THREADS,
    )
    assert await hold(conversation, history, Saying("7")) == whole
