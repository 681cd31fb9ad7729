"""A trial of a run: its model answers, with the parts of a worker and the model's own weights."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from vcpo.api import VCPORun, load_run
from vcpo.local.preflight import with_local_paths
from vcpo.records.trial import AnsweredPrompt, FailedPrompt, TrialEnd, TrialMessage, read_message
from vcpo.service.lifecycle import StartError
from vcpo_rollout.trial import try_run

FILE = Path(__file__).parents[3] / "examples" / "sort_digits.yaml"


async def trial_of(*changes: str, prompts: int = 2, shows_tokens: bool = False):
    messages = io.StringIO()
    await try_run(run_of(*changes), prompts, messages, shows_tokens=shows_tokens)
    return [read_message(line) for line in messages.getvalue().splitlines()]


def run_of(*changes: str) -> VCPORun:
    return with_local_paths(load_run(FILE, changes), FILE)


def answers_of(told: list[TrialMessage]) -> list[AnsweredPrompt]:
    found = [each for each in told if isinstance(each, AnsweredPrompt)]
    return sorted(found, key=lambda each: each.samples[0].prompt_index)


async def test_each_prompt_gets_a_judged_group_and_the_end_comes_last():
    *answered, end = await trial_of()
    assert isinstance(end, TrialEnd)
    assert end.seconds > 0
    groups = answers_of(answered)
    assert [group.samples[0].prompt_index for group in groups] == [0, 1]
    for group in groups:
        assert len(group.samples) == 8
        for each in group.samples:
            digits = each.prompt.removeprefix("sort ").removesuffix("=")
            wanted = "".join(sorted(digits))
            assert each.reward == float(each.response.removesuffix("<eos>") == wanted)
            assert each.prompt_tokens == len("sort 12345=")
            assert each.finish_reason == "stop"
            assert each.response_tokens == len(each.response.removesuffix("<eos>")) + 1
        assert group.samples[0].group_rewards == tuple(each.reward for each in group.samples)


async def test_new_adapters_and_a_second_trial_change_no_answer():
    before, after = await trial_of(prompts=1), await trial_of("model.lora={rank: 2}", prompts=1)
    assert answers_of(before) == answers_of(after)


async def test_a_response_that_reaches_the_limit_is_cut():
    (group,) = answers_of(await trial_of("sampling.maxNewTokens=2", prompts=1))
    assert all(each.is_cut and each.response_tokens == 2 for each in group.samples)


async def test_a_prompt_is_shown_token_by_token():
    (group,) = answers_of(await trial_of(prompts=1, shows_tokens=True))
    pieces = [each.partition(":")[2] for each in group.samples[0].prompt.split(" ") if ":" in each]
    assert "".join(piece.strip("'") for piece in pieces).startswith("sort")


async def test_a_prompt_that_fails_is_told_and_the_others_are_answered(tmp_path, monkeypatch):
    (tmp_path / "failing_task.py").write_text(
        "from vcpo_rollout.environments import Prompt\n"
        "class Task:\n"
        "    def __init__(self, *, seed): pass\n"
        "    def prompt(self, split, index): return Prompt(text=f'{index}', answer='')\n"
        "    def reward(self, prompt, response):\n"
        "        return {'right': 1 / int(prompt.text), 'short': 0.5}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = "environment={name: 'failing_task:Task'}"
    told = await trial_of(own)
    (failed,) = [each for each in told if isinstance(each, FailedPrompt)]
    assert failed.prompt_index == 0
    assert "ZeroDivisionError" in failed.why
    assert "failing_task.py:6" in failed.why
    (answered,) = answers_of(told)
    assert {each.prompt for each in answered.samples} == {"1"}
    for each in answered.samples:
        assert (each.reward, each.reward_parts) == (1.5, {"right": 1.0, "short": 0.5})


async def test_what_the_user_must_correct_is_named():
    with pytest.raises(StartError, match=r"^environment\.name: 'nowhere:Task' cannot be imported"):
        await trial_of("environment={name: 'nowhere:Task'}")
