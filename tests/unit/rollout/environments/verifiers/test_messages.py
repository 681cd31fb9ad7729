"""Tool calls in what a model writes: found, or left as text."""

import json

import pytest

from vcpo_rollout.environments.verifiers.messages import to_assistant_message


def calls_in(response):
    message = to_assistant_message(response, has_tools=True)
    return [call["function"] for call in message.get("tool_calls", ())]


def test_calls_are_found_between_any_text_and_space():
    response = 'a <tool_call>\n {"name": "f", "arguments": {"x": 1}} \n</tool_call> b'
    second = '<tool_call>{"name": "g"}</tool_call> <tool_call> {"name": "unfinished"}'
    calls = calls_in(response + second)
    assert [call["name"] for call in calls] == ["f", "g"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"x": 1}, {}]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"name": 3}', "{", "[" * 100_000, '{"name": "f", "arguments": ' + "[" * 9999],
)
def test_what_is_no_call_is_left_as_text(text):
    assert calls_in(f"<tool_call>{text}</tool_call>") == []


def test_a_response_of_nothing_but_open_calls_or_spaces_is_searched_once():
    # A search of each call to the end of the response takes a day.
    assert calls_in("<tool_call>" * 1_000_000) == []
    assert calls_in(f"<tool_call>{' ' * 1_000_000}x</tool_call>") == []
