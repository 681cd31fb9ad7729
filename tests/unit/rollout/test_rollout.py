import io
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from vcpo.api import VCPORun, load_run, parse_run, run_to_yaml
from vcpo.local.preflight import with_local_paths
from vcpo.local.processes.child import free_port
from vcpo.metrics import RolloutMetrics
from vcpo.records.samples import AnsweredPrompt, FailedPrompt, TrialEnd, TrialMessage, read_message
from vcpo.service.lifecycle import CANNOT_START, StartError
from vcpo.service.process import module_command
from vcpo.wire.failures import FailureCause
from vcpo_rollout.app import Options, run_worker
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.environment_pool import (
    EnvironmentFailedError,
    EnvironmentThreads,
    environment_errors,
)
from vcpo_rollout.trial import try_run

RUN = """
metadata: {name: r}
spec: {model: {name: m}, environment: {name: "beside_the_file:Task"}, steps: 1}
"""
TASK = """
class Task:
    def __init__(self, *, seed): ...
    def prompt(self, split, index): ...
    def reward(self, prompt, response): return 0.0
"""


def options(run_file) -> Options:
    """Of a worker that gets as far as its metrics' address, which is none."""
    return Options(
        run_file=run_file,
        learner="127.0.0.1:1",
        group="main",
        worker_id="w",
        listen="127.0.0.1:0",
        metrics_listen="nowhere",
        drain_s=0.0,
        tls=None,
        plain_text=False,
        health_listen=None,
        ready_file=None,
        exit_with_parent=False,
    )


@pytest.fixture
def run_dir_file(tmp_path, monkeypatch):
    """The file that a run directory holds, of a run whose own file lay in another folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "beside_the_file", raising=False)
    run = with_local_paths(parse_run(RUN), tmp_path / "mine" / "run.yaml")
    path = tmp_path / "spec.yaml"
    path.write_text(run_to_yaml(run))
    (tmp_path / "mine").mkdir()
    return path


async def test_an_environment_beside_the_runs_file_is_found_from_the_run_directory(run_dir_file):
    (run_dir_file.parent / "mine" / "beside_the_file.py").write_text(TASK)
    with pytest.raises(StartError, match="address: must be host:port, got 'nowhere'"):
        await run_worker(options(run_dir_file))


async def test_one_that_is_not_there_is_named_before_anything_is_loaded(run_dir_file):
    with pytest.raises(StartError, match=r"'beside_the_file:Task' cannot be imported"):
        await run_worker(options(run_dir_file))


ENGINE = """
from vcpo_rollout.engines.hf.engine import HfEngine

class Unlicensed(HfEngine):
    @classmethod
    def load(cls, *, setting): raise RuntimeError("no license")
"""


def test_a_worker_that_cannot_load_its_engine_ends_with_the_cause(tmp_path):
    (tmp_path / "own_engine.py").write_text(ENGINE)
    run = run_of("rollouts=[{name: main, engine: 'own_engine:Unlicensed'}]")
    folder = {"vcpo.dev/run-folder": str(tmp_path)}
    run = run.model_copy(
        update={"metadata": run.metadata.model_copy(update={"annotations": folder})}
    )
    (tmp_path / "run.yaml").write_text(run_to_yaml(run))
    anywhere = ["--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"]
    command = module_command("vcpo_rollout", str(tmp_path / "run.yaml"), "--learner=127.0.0.1:1")
    ended = subprocess.run(
        [*command, "--group=main", *anywhere], capture_output=True, text=True, check=False
    )
    assert ended.returncode == CANNOT_START
    assert "Unlicensed' cannot be loaded (RuntimeError: no license); correct" in ended.stderr


async def test_a_worker_that_cannot_load_stops_its_server(run_dir_file, monkeypatch):
    (run_dir_file.parent / "mine" / "beside_the_file.py").write_text(TASK)
    port = free_port()
    monkeypatch.setattr("vcpo_rollout.app.load_sampler", lambda *_, **__: {}["weights"])
    given = replace(options(run_dir_file), listen=f"127.0.0.1:{port}", metrics_listen="127.0.0.1:0")
    with pytest.raises(KeyError, match="weights"):
        await run_worker(given)
    socket.create_server(("127.0.0.1", port)).close()


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


async def test_a_trial_says_if_no_response_marks_its_answer_and_none_is_right(capsys):
    await trial_of("environment.parameters.digits=12", prompts=1)
    assert "no response marks its answer" in capsys.readouterr().err


async def test_each_prompt_gets_a_judged_group_and_the_end_comes_last(capsys):
    *answered, end = await trial_of()
    assert "no response marks" not in capsys.readouterr().err  # some are right as they are
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
        "    def prompt(self, split, index): return Prompt(text=f'{index}', answer='4\\ud800')\n"
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
    shown = {(each.prompt, each.question, each.answer) for each in answered.samples}
    assert shown == {("1", "1", "4?")}
    for each in answered.samples:
        assert (each.reward, each.reward_parts) == (1.5, {"right": 1.0, "short": 0.5})


class WorkerMetrics:
    """The metrics of one worker, its gauges, and its environment's threads."""

    def __init__(self) -> None:
        self.metrics = RolloutMetrics(run="run", group="main")
        self.gauges = RolloutGauges(self.metrics)
        self.threads = EnvironmentThreads(2, gauges=self.gauges)

    def value(self, name: str, **labels: str) -> float | None:
        labels = {"run": "run", "group": "main", **labels}
        return self.metrics.registry.get_sample_value(f"vcpo_rollout_{name}", labels)


def fail(error: Exception) -> None:
    with environment_errors(FailureCause.REWARD):
        raise error


async def test_calls_of_the_environment_are_timed_whether_or_not_they_fail():
    worker = WorkerMetrics()
    await worker.threads.call(lambda: 1.0)
    with pytest.raises(EnvironmentFailedError):
        await worker.threads.call(partial(fail, KeyError("answer")))
    assert worker.value("environment_seconds_count") == 2.0
    assert worker.value("environment_seconds_sum") > 0.0


@pytest.mark.parametrize(
    ("events", "age"),
    [
        ([("swap", 3)], 0.0),
        ([("swap", 3), ("hear", 5)], 2.0),
        ([("hear", 5), ("swap", 3)], 2.0),
        ([("hear", 5), ("swap", 3), ("swap", 5)], 0.0),
        ([("swap", 9), ("hear", 4)], 0.0),
        ([("hear", 5)], None),
    ],
    ids=["newest", "behind", "behind at once", "caught up", "a learner that went back", "none"],
)
def test_the_age_of_the_weights_is_how_far_they_are_behind_what_was_heard(events, age):
    worker = WorkerMetrics()
    for kind, version in events:
        if kind == "swap":
            worker.gauges.record_swap(version, 0.1)
        else:
            worker.gauges.hear_of_version(version)
    assert worker.value("weights_age_versions") == age
