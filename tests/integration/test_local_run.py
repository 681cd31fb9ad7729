"""Local runs of `vcpo run`: completed, disturbed, killed and refused."""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
)

from examples.models import make_model, warm_start
from tests.fixtures.families import family
from tests.integration.local_run import (
    ROOT,
    LocalRun,
    StartRun,
    assert_accounting_is_exact,
    is_alive,
    runs_in,
    wait_for_exit,
    wait_until,
)
from vcpo_learner.checkpoints.tensor_files import parameter_shapes
from vcpo_rollout.environments import make_environment


def test_a_run_trains_off_policy_and_leaves_a_model_that_loads(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VCPO_LOG_FORMAT", "json")
    run = start_run(steps=12)
    status, summary = run.finish()
    assert status == 0
    assert summary["steps"] == 12
    # How many take part depends on how fast the second one loads; that both were started does not.
    assert 1 <= summary["workers"] <= 2
    assert (run.path / "logs" / "main-1.log").exists()
    assert summary["trajectories"]["consumed"] == 12 * 16
    assert 0 <= summary["policy_lag_max"] <= 4
    assert 1 / 16 <= summary["ess_ratio_min"] <= 1
    assert_accounting_is_exact(summary)
    assert [step.step for step in run.metrics.steps] == list(range(1, 13))
    assert [evaluation.step for evaluation in run.metrics.evaluations] == [0, 12]
    first = run.metrics.evaluations[0]
    assert first.policy_version_min == first.policy_version_max == 0
    assert (run.path / "report.html").stat().st_size > 0
    model = AutoModelForCausalLM.from_pretrained(run.path / "model")
    assert model.num_parameters() > 100_000
    assert AutoTokenizer.from_pretrained(run.path / "model").eos_token_id is not None
    assert not any(is_alive(pid) for pid in run.pids())
    assert_every_log_line_is_json(run)
    assert run.path.stat().st_mode & 0o077 == 0, "others can reach prompts and responses"


def assert_every_log_line_is_json(run: LocalRun) -> None:
    """Also that the learner's lines are those of the journal, and have the numbers of steps."""
    written = [log.read_text().splitlines() for log in (run.path / "logs").glob("*.log")]
    lines = [json.loads(line) for log in written for line in log]
    assert {line["part"] for line in lines} == {"learner", "rollout"}
    assert all({"time", "level", "logger", "message", "pod", "namespace"} <= set(line)
               for line in lines)  # fmt: skip
    assert {line["run"] for line in lines} == {"small"}
    workers = {line["worker"] for line in lines if line["part"] == "rollout"}
    assert workers <= {"main-0", "main-1"}
    logged = [line["event"] for line in lines if "event" in line]
    assert logged == [event.kind for event in run.events if event.source == "learner"]
    assert 12 in [line["step"] for line in lines if "relative_ess_ratio" in line]


TEACHER = make_model.RECIPES["tiny"].tasks["sort_digits"]
THREE_DIGITS = {"digits": 3, "style": "plain"}
HYBRID_SETTINGS = {
    "environment.parameters": json.dumps(THREE_DIGITS),
    "batch": "{promptsPerStep: 8, trajectoriesPerPrompt: 8}",
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tower for images, whose language model sorts some of three digits."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/models/tiny")
    text = family("qwen3_5_text")
    for parameter in text.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05)
    environment = make_environment(TEACHER.environment, THREE_DIGITS, 0)
    pairs = make_model.pairs({"": TEACHER}, {"": environment}, "blur", 0)
    sizes = {"steps": 120, "batch_size": 32, "learning_rate": 4e-3}
    warm_start.train(text.train(), tokenizer, pairs, name="blur", **sizes)
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    config = Qwen3_5Config(
        text_config=text.config.to_dict(), vision_config=tower | {"out_hidden_size": 64}
    )
    whole = Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    folder = tmp_path_factory.mktemp("hybrid")
    for each in (whole, tokenizer):
        each.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({}, "1e-3"),
        ({"learner": ", processes: 2"}, "1e-3"),
        ({"adapters": ", lora: {rank: 8, alpha: 16}"}, "2e-3"),
    ],
    ids=["whole", "two ranks", "adapters"],
)
def test_a_hybrid_with_a_tower_for_images_learns_and_leaves_its_language_model(
    start_run: StartRun, hybrid: Path, changes: dict[str, str], rate: str
) -> None:
    settings = HYBRID_SETTINGS | {"optimizer.learningRate": rate}
    options = [f"--set={field}={value}" for field, value in settings.items()]
    run = start_run(*options, steps=30, lag=6, workers=1, model=hybrid, **changes)
    status, summary = run.finish()
    assert (status, summary["steps"]) == (0, 30)
    log = (run.path / "logs/learner.log").read_text()
    assert log.count("only Qwen3_5ForCausalLM is trained and exported") == 1
    rewards = [step.reward_mean for step in run.metrics.steps]
    # Five standard deviations of the difference of two shares of 8 * 64 answers, at most.
    assert sum(rewards[-8:]) - sum(rewards[:8]) > 8 * 5 * (2 * 0.25 / 512) ** 0.5
    model = AutoModelForCausalLM.from_pretrained(run.path / "model")
    assert isinstance(model, Qwen3_5ForCausalLM)


def test_a_run_of_adapters_publishes_little_and_leaves_a_whole_model(start_run: StartRun) -> None:
    run = start_run(steps=3, workers=1, adapters=", lora: {rank: 2, alpha: 4}")
    status, summary = run.finish()
    assert status == 0
    assert summary["trajectories"]["consumed"] == 3 * 16
    # Fresh trajectories of the merged weights have the learner's own log-probabilities.
    (check,) = [event.message for event in run.events if event.kind == "SelfCheck"]
    assert float(check.split()[5]) < 1e-4
    (saved,) = (run.path / "checkpoints").glob("step-*/tensors")
    model = AutoModelForCausalLM.from_pretrained(run.path / "model")
    trained = sum(shape.numel() for shape in parameter_shapes(saved).values())
    assert trained < model.num_parameters() / 10
    base = AutoModelForCausalLM.from_pretrained(ROOT / "examples/models/tiny")
    adapted = PeftModel.from_pretrained(base, run.path / "adapters")
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, model(tokens).logits)


@dataclass(frozen=True, slots=True, kw_only=True)
class DisturbedRun:
    """A run that has ended, and what was seen on its way."""

    run: LocalRun
    status: int
    summary: dict[str, Any]
    scraped: dict[str, list[float]]
    """Values of metrics of learner and worker while the run worked."""
    senders: list[int]
    """Processes that sent weights, before the learner was killed."""
    learner_log: str
    """By then."""

    def messages(self, kind: str) -> list[str]:
        return [event.message for event in self.run.events if event.kind == kind]


DISTURBED_STEPS = 60


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisturbedRun]:
    """A run whose learner is stopped for a while, and whose processes are killed, one by one."""
    with runs_in(tmp_path_factory.mktemp("disturbed")) as start_run:
        run = start_run(steps=DISTURBED_STEPS)
        run.wait_for_step(2)
        scraped = {"learner": scrape(run.metrics_port_of("learner"), "vcpo_ess_ratio")}
        # The other worker may have made all the tokens so far.
        port = run.metrics_port_of("main-0")
        wait_until(lambda: sum(scrape(port, "vcpo_rollout_tokens_total")) > 0, "a token", run)

        def kinds() -> list[str]:
            return [event.kind for event in run.events if event.source == "host"]

        os.kill(weight_servers(run)[0], signal.SIGKILL)
        wait_until(lambda: len(weight_servers(run)) == 2, "another process", run)
        os.kill(run.pid_of("main-0"), signal.SIGKILL)
        wait_until(lambda: "WorkerLost" in kinds(), "a lost worker", run)
        run.wait_for_step(12)
        senders, log = weight_servers(run), (run.path / "logs" / "learner.log").read_text()
        os.kill(run.pid_of("learner"), signal.SIGKILL)
        status, summary = run.finish()
        yield DisturbedRun(
            run=run,
            status=status,
            summary=summary,
            scraped=scraped,
            senders=senders,
            learner_log=log,
        )


def test_whatever_is_killed_a_run_comes_to_its_end_and_its_accounting_is_exact(
    disturbed: DisturbedRun,
) -> None:
    assert disturbed.status == 0
    assert disturbed.summary["steps"] == DISTURBED_STEPS
    assert_accounting_is_exact(disturbed.summary)
    assert disturbed.summary["policy_lag_max"] <= 4
    assert not any(is_alive(pid) for pid in disturbed.run.pids())


def test_metrics_can_be_scraped_while_a_run_works(disturbed: DisturbedRun) -> None:
    assert min(disturbed.scraped["learner"]) > 0


def test_a_killed_worker_is_replaced(disturbed: DisturbedRun) -> None:
    (lost,) = disturbed.messages("WorkerLost")
    assert lost.startswith("main-0 was killed by SIGKILL")
    logs = disturbed.run.path / "logs"
    assert (logs / "main-2.log").exists()
    assert not any("Traceback" in log.read_text() for log in logs.glob("main-*.log"))


def test_a_killed_server_of_weights_is_replaced(disturbed: DisturbedRun) -> None:
    assert "was killed by SIGKILL" in disturbed.learner_log
    assert len(disturbed.senders) == 2
    assert not any(is_alive(pid) for pid in disturbed.senders)


def test_a_killed_learner_goes_on_from_its_checkpoint(disturbed: DisturbedRun) -> None:
    steps = disturbed.run.metrics.steps
    # What the surviving history trained on: every step once, a full batch each.
    assert disturbed.summary["trajectories"]["consumed"] == DISTURBED_STEPS * 16
    assert [step.step for step in steps] == list(range(1, DISTURBED_STEPS + 1))
    assert [step.consumed for step in steps] == [16 * step.step for step in steps]
    assert len(disturbed.messages("LearnerRestarted")) == 1
    assert disturbed.messages("Resumed")


def scrape(port: int, metric: str) -> list[float]:
    """Values of a metric's series, as a scraper reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric}{{")]


def weight_servers(run: LocalRun) -> list[int]:
    """Ids of the processes that sent weights, from the learner's log."""
    log = (run.path / "logs" / "learner.log").read_text()
    return [int(pid) for pid in re.findall(r"process (\d+) sends weights", log)]


def test_no_process_outlives_a_killed_host_even_if_it_is_stopped(start_run: StartRun) -> None:
    run = start_run(steps=100_000, workers=1)
    run.wait_for_step(2)
    pids = [run.pid_of(name) for name in ("learner", "main-0")]
    pids += weight_servers(run)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    run.process.kill()
    run.process.join()
    assert len(pids) == 3
    wait_for_exit(pids)
    assert list((run.path / "checkpoints").glob("step-*/meta.json"))  # the learner still saved


FAULTY = """
import sys

from vcpo_rollout.engines.hf import decoding
from vcpo_rollout.environments.sort_digits import SortDigits

sample_tokens = decoding.sample_tokens


def sample_tokens_at_another_temperature(*arguments):
    token_ids, logprobs = sample_tokens(*arguments)
    return token_ids, [each - 0.5 for each in logprobs]


class Faulty(SortDigits):
    def reward(self, prompt, response):
        if "--worker-id=main-1" in sys.argv:
            raise OSError("no space left on device")
        return super().reward(prompt, response)


if "--worker-id=main-3" in sys.argv:
    decoding.sample_tokens = sample_tokens_at_another_temperature
"""
"""An environment that fails on one worker; the one after it reports other log-probabilities."""


def test_workers_with_a_fault_of_their_own_are_replaced_and_the_run_goes_on(
    start_run: StartRun, tmp_path: Path
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    run = start_run(steps=10_000, environment="'faulty:Faulty'", workers=3, failures=8)

    def messages(kind: str) -> list[str]:
        return [event.message for event in run.events if event.kind == kind]

    wait_until(lambda: messages("WorkerLost") != [], "a worker that is set aside", run)
    wait_until((run.path / "logs" / "main-3.log").exists, "the worker after it", run)
    wait_until(lambda: len(messages("WorkerLost")) == 2, "another one that is set aside", run)
    wait_until((run.path / "logs" / "main-4.log").exists, "the worker after them", run)
    run.wait_for_step(run.metrics.steps[-1].step + 5)
    os.kill(run.process.pid, signal.SIGINT)
    status, summary = run.finish()
    assert status == 130
    assert_accounting_is_exact(summary)
    faults = {"main-1": "failing", "main-3": "mismatch"}
    for message, (worker, cause) in zip(messages("WorkerSetAside"), faults.items(), strict=True):
        assert message.startswith(f"{worker}: {cause}: ")
    for message, (worker, cause) in zip(messages("WorkerLost"), faults.items(), strict=True):
        said = f"{worker} ended with status 77: set aside by the learner: {cause}: "
        assert message.startswith(said)


CHOOSY = """
import os

from vcpo_rollout.environments.sort_digits import SortDigits


class Choosy(SortDigits):
    def __init__(self, **settings):
        if "VCPO_WORKER_KEY" in os.environ:
            raise ValueError("environment.parameters.digits: 5 is too many for a worker")
        super().__init__(**settings)
"""
"""An environment that can be tried, and that no worker can have."""


def test_a_worker_that_cannot_work_ends_the_run_with_its_reason(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VCPO_LOG_FORMAT", "json")
    (tmp_path / "choosy.py").write_text(CHOOSY)
    run = start_run(workers=1, environment="'choosy:Choosy'")
    status, summary = run.finish()
    assert status == 1
    assert summary["steps"] == 0
    failure = next(event.message for event in run.events if event.kind == "Failed")
    assert failure.endswith(
        "cannot start: environment.parameters.digits: 5 is too many for a worker"
    )
    assert not any(is_alive(pid) for pid in run.pids())
