"""`vcpo try` and `vcpo samples`: what a person sees of prompts and answers."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.fixtures.records import make_sample
from vcpo.cli.main import app
from vcpo.local.run_dir import RunDir
from vcpo.local.terminal.samples import trial_advice, trial_facts
from vcpo.records.samples import write_samples

TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny"
TASK = r"""
from vcpo_rollout.environments import Prompt

class Task:
    def __init__(self, *, seed): ...
    def prompt(self, split, index):
        print(f"asked for {index}\n", end="")  # in one piece: two threads print
        return Prompt(text="sort 21=" if index else 8 * "sort ", answer="12")
    def reward(self, prompt, response):
        return float(response == prompt.answer)
"""
RUN = """
metadata: {name: r}
spec:
  model: {name: m}
  environment: {name: "own_task:Task"}
  steps: 4
  sampling: {maxNewTokens: 3}
  batch: {trajectoriesPerPrompt: 4}
  rollouts: [{name: main, maxModelLen: 20, threads: 1}]
"""


def vcpo(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


class TestTry:
    @pytest.fixture
    def run_file(self, tmp_path):
        shutil.copytree(TINY, tmp_path / "m")
        (tmp_path / "own_task.py").write_text(TASK)
        path = tmp_path / "run.yaml"
        path.write_text(RUN)
        return path

    def test_the_model_answers_and_what_fails_or_is_printed_is_shown_beside(self, run_file):
        tried = vcpo("try", run_file, "--prompts", 2, "--answers", 2)
        assert tried.exit_code == 0, tried.stderr
        first, second, answer, third, *lines = tried.stdout.splitlines()
        assert (first, second) == ("prompt 1, 8 tokens", "    | sort 21=")
        assert answer == "  answer 12"
        assert third.startswith("  rewards ")
        assert all(line.startswith("  reward ") for line in lines[:2])
        assert lines[3].startswith("answers            4, to 1 prompts, in ")
        assert "asked for 1" in tried.stderr
        assert "prompt 0 failed: " in tried.stderr
        assert not [each for each in run_file.parent.iterdir() if each.name in {"runs", "samples"}]

    def test_facts_are_counted_by_group_and_by_answer(self):
        answers = [
            make_sample(prompt_index=0, reward=1.0, group_rewards=(1.0, 0.0), prompt_tokens=5),
            make_sample(prompt_index=0, reward=0.0, group_rewards=(1.0, 0.0), prompt_tokens=5),
            make_sample(prompt_index=1, reward=0.5, group_rewards=(0.5,), prompt_tokens=11),
            make_sample(
                prompt_index=2,
                reward=0.5,
                group_rewards=(0.5,),
                finish_reason="length",
                response_tokens=10,
            ),
        ]
        facts = trial_facts(answers, seconds=2.0)
        assert facts["teaching_groups_ratio"] == pytest.approx(1 / 3)
        assert facts["cut_responses_ratio"] == 0.25
        assert (facts["reward_mean"], facts["tokens_per_s"]) == (0.5, (2 + 2 + 2 + 10) / 2.0)
        assert facts["prompt_tokens_mean"] == pytest.approx((5 + 11 + 7) / 3)
        assert (facts["prompt_tokens_max"], facts["response_tokens_max"]) == (11, 10)
        assert list(trial_advice(facts)) == []


class TestSamples:
    @pytest.fixture
    def run_dir(self, tmp_path):
        directory = RunDir(tmp_path / "run")
        directory.path.mkdir()
        directory.spec.touch()
        for step in range(1, 4):
            parts = {"right": step - 0.5, "short": 0.5}
            few = [make_sample(step=step, reward=step, response=f"answer {step}", worker="\x1b[0",
                               reward_parts=parts)]  # fmt: skip
            few += [make_sample(step=step, reward=-step, response="a\n\x1b[2Jb", prompt="Wrong?",
                                reward_parts={"reward": -step})]  # fmt: skip
            write_samples(directory.path, step, few, total_steps=400)
        return directory.path

    def test_the_newest_step_is_shown(self, run_dir):
        assert vcpo("samples", run_dir).stdout == (
            "step 3, prompt 3, 7 tokens\n"
            "    | 2 + 2 =\n"
            "  rewards 1 0 (teaches)\n"
            "  reward 3 (right 2.5, short 0.5), 2 tokens, stop, version 0 of  [0 | answer 3\n"
            "\n"
            "step 3, prompt 3, 7 tokens\n"
            "    | Wrong?\n"
            "  rewards 1 0 (teaches)\n"
            "  reward -3, 2 tokens, stop\n"
            "    | a\n"
            "    |  [2Jb\n"
            "\n"
        )

    @pytest.mark.parametrize(
        ("options", "rewards"),
        [
            (["--best", "--limit", 2], [3, 2]),
            (["--worst", "--limit", 1], [-3]),
            (["--step", 2], [2, -2]),
            (["--step", 300], [3, -3]),
            (["--grep", "WRONG"], [-1, -2, -3]),
            (["--grep", "answer 2"], [2]),
        ],
    )
    def test_others_are_asked_for(self, run_dir, options, rewards):
        shown = vcpo("samples", run_dir, "--json", *options)
        assert [json.loads(line)["reward"] for line in shown.stdout.splitlines()] == rewards

    def test_what_cannot_be_shown_is_said(self, run_dir, tmp_path):
        assert vcpo("samples", run_dir, "--grep", "nothing").exit_code == 1
        both = vcpo("samples", run_dir, "--best", "--worst")
        assert (both.exit_code, both.stderr[:9]) == (2, "--worst: ")
        assert "has no run" in vcpo("samples", tmp_path).stderr
