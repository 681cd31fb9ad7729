"""A judge behind a real HTTP endpoint on this machine."""

from __future__ import annotations

import pytest

from tests.fixtures.rollout.judge_server import serve_judge
from vcpo_rollout.environments import Prompt
from vcpo_rollout.environments.rewards.judge import KEY, Judge

PROMPT = Prompt(text="What is {answer}?", answer="a word")
AT_ONCE = {"Retry-After": "0"}


@pytest.fixture
def server():
    with serve_judge() as judge:
        yield judge


def judge_at(server, **parameters):
    return Judge(**{"url": server.url, "model": "m", "timeout_seconds": 30, **parameters})


def test_the_grade_is_the_last_number_over_the_highest(server):
    for number, (reply, grade) in enumerate(
        [("7", 0.7), ("2 of 3 facts hold.\nGrade: 4.5", 0.45), ("12", 1.0), ("-3", 0.0)]
    ):
        server.reply = lambda _, reply=reply: reply
        assert judge_at(server)(PROMPT, f"response {number}") == grade


def test_the_judge_sees_question_answer_and_response_as_they_are(server):
    judge = judge_at(
        server,
        instruction="{question}|{answer}|{response}|{highest}|{other}",
        highest=5,
        arguments={"max_tokens": 3, "temperature": 1},
    )
    judge(PROMPT, "{question} {highest}")
    assert server.requests == [
        {
            "model": "m",
            "temperature": 1,
            "max_tokens": 3,
            "messages": [
                {
                    "role": "user",
                    "content": "What is {answer}?|a word|{question} {highest}|5|{other}",
                }
            ],
        }
    ]


def test_the_key_is_shown_if_there_is_one(server, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    judge_at(server)(PROMPT, "")
    monkeypatch.setenv(KEY, "secret")
    judge_at(server)(PROMPT, "")
    assert server.keys == [None, "Bearer secret"]


def test_the_same_response_is_judged_once(server):
    judge = judge_at(server)
    assert [judge(PROMPT, text) for text in ("a", "b", "a")] == [1.0, 1.0, 1.0]
    assert len(server.requests) == 2


def test_a_busy_endpoint_is_asked_again(server):
    server.failures = [(429, AT_ONCE), (503, AT_ONCE)]
    assert judge_at(server)(PROMPT, "a") == 1.0
    assert len(server.requests) == 3


def test_an_endpoint_that_stays_busy_is_as_one_that_is_away(server):
    server.failures = [(503, {"Retry-After": "40"})]
    with pytest.raises(ConnectionError, match=r"did not judge within 30 s .*: 503 not now"):
        judge_at(server)(PROMPT, "a")
    assert len(server.requests) == 1


def test_an_endpoint_that_nobody_serves_is_away():
    judge = Judge(url="http://127.0.0.1:1/v1", model="m", timeout_seconds=0.1)
    with pytest.raises(ConnectionError, match=r"did not judge within 0\.1 s .*refused"):
        judge(PROMPT, "a")


@pytest.mark.parametrize(
    ("status", "headers"), [(401, {}), (404, {}), (307, {"Location": "http://127.0.0.1:1/"})]
)
def test_a_refusal_is_told_and_not_repeated(server, status, headers):
    server.failures = [(status, headers)]
    with pytest.raises(RuntimeError, match=rf"/v1/chat/completions answered {status}: not now"):
        judge_at(server)(PROMPT, "a")
    assert len(server.requests) == 1


def test_the_budget_counts_requests_and_its_end_is_told(server):
    judge = judge_at(server, max_calls=2)
    assert judge(PROMPT, "a") == 1.0
    server.failures = [(500, AT_ONCE)]
    with pytest.raises(RuntimeError, match="the judge's 2 calls are used up; raise max_calls"):
        judge(PROMPT, "b")
    assert judge(PROMPT, "a") == 1.0  # it is in the cache
    assert len(server.requests) == 2


def test_a_reply_without_a_number_is_no_grade(server):
    server.reply = lambda _: "Very good!"
    with pytest.raises(ValueError, match="the judge gave no number: 'Very good!'"):
        judge_at(server)(PROMPT, "a")


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"url": "localhost:8000"}, r"url: 'localhost:8000' is no address of an endpoint"),
        ({"url": "http://judge/v1"}, r"url: others could read along .*use https, or set `plain"),
        ({"instruction": "Grade it."}, r"instruction: 'Grade it.' does not show the response"),
        ({"highest": 0}, r"highest: 0 is not an integer from 1"),
        ({"max_calls": 0}, r"max_calls: 0 is not an integer from 1"),
        ({"timeout_seconds": -1}, r"timeout_seconds: -1 is not a number of seconds"),
    ],
)
def test_a_bad_parameter_is_named(parameters, said):
    with pytest.raises(ValueError, match=rf"^environment\.parameters\.{said}"):
        Judge(**{"url": "http://localhost/v1", "model": "m", **parameters})


def test_plain_text_beyond_this_machine_is_had_by_name():
    Judge(url="http://judge/v1", model="m", plain_text=True)
    Judge(url="https://judge/v1", model="m")
