"""Local runs of `vcpo run`: completed, drained, killed and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fixtures.tracking import tensorboard_scalars
from tests.integration.local_run import (
    ROOT,
    LocalRun,
    StartRun,
    is_alive,
    wait_for_exit,
    wait_until,
)
from vcpo_learner.checkpoints.tensor_files import parameter_shapes


def assert_accounting_is_exact(summary: dict[str, Any]) -> None:
    counts = summary["trajectories"]
    dropped = sum(counts["dropped"].values())
    total = counts["consumed"] + counts["in_flight"] + counts["buffered"] + dropped
    assert counts["leased"] == total


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
    assert files_that_others_can_reach(run) == []


def files_that_others_can_reach(run: LocalRun) -> list[str]:
    """Every folder and file of a run directory of which another user has any right."""
    return [
        f"{path.stat().st_mode & 0o777:o} {path.relative_to(run.path.parent)}"
        for path in (run.path, *sorted(run.path.rglob("*")))
        if path.stat().st_mode & 0o077
    ]


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


def test_a_run_of_adapters_publishes_little_and_leaves_a_whole_model(start_run: StartRun) -> None:
    run = start_run(steps=3, adapters=", lora: {rank: 2, alpha: 4}")
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


def test_a_stopped_learner_is_told_of_and_so_is_its_return(start_run: StartRun) -> None:
    run = start_run(steps=20, control=", signalsMaxAgeSeconds: 2")
    run.wait_for_step(2)
    learner = run.pid_of("learner")

    def kinds() -> list[str]:
        return [event.kind for event in run.events if event.source == "host"]

    os.kill(learner, signal.SIGSTOP)
    wait_until(lambda: "SignalsStale" in kinds(), "signals that are too old", run)
    stopped_at = len(run.metrics.steps)
    silent = shown_by_top(run)
    assert (silent["status"], silent["step"]) == ("silent", stopped_at)
    os.kill(learner, signal.SIGCONT)
    wait_until(lambda: "SignalsFresh" in kinds(), "fresh signals", run)
    status, summary = run.finish()
    assert (status, summary["steps"]) == (0, 20)
    assert stopped_at < 20
    assert "LearnerRestarted" not in kinds()
    (stale, *_) = [event.message for event in run.events if event.kind == "SignalsStale"]
    assert "deadline exceeded" in stale


def shown_by_top(run: LocalRun) -> dict[str, Any]:
    """The row of a run that `vcpo top --json` prints."""
    command = [sys.executable, "-m", "vcpo.cli.main", "top", str(run.path), "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    (row,) = json.loads(printed)["runs"]
    return dict(row)


def test_a_killed_worker_is_replaced_and_the_accounting_stays_exact(start_run: StartRun) -> None:
    run = start_run(steps=60)
    run.wait_for_step(3)
    os.kill(run.pid_of("main-0"), signal.SIGKILL)
    status, summary = run.finish()
    assert status == 0
    assert summary["steps"] == 60
    assert_accounting_is_exact(summary)
    assert summary["policy_lag_max"] <= 4
    lost = [event.message for event in run.events if event.kind == "WorkerLost"]
    assert len(lost) == 1
    assert lost[0].startswith("main-0 was killed by SIGKILL")
    assert (run.path / "logs" / "main-2.log").exists()


def test_a_killed_learner_goes_on_from_its_checkpoint(start_run: StartRun) -> None:
    run = start_run(steps=40)
    run.wait_for_step(12)
    os.kill(run.pid_of("learner"), signal.SIGKILL)
    status, summary = run.finish()
    assert status == 0
    assert summary["steps"] == 40
    assert_accounting_is_exact(summary)
    # What the surviving history trained on: every step once, a full batch each.
    assert summary["trajectories"]["consumed"] == 40 * 16
    assert [step.step for step in run.metrics.steps] == list(range(1, 41))
    assert summary["policy_lag_max"] <= 4
    kinds = [event.kind for event in run.events]
    assert kinds.count("LearnerRestarted") == 1
    assert "Resumed" in kinds
    # Steps after the checkpoint were redone from the log, with the same parameters.
    assert "RedoDiffers" not in kinds
    assert [step.consumed for step in run.metrics.steps] == [16 * step for step in range(1, 41)]
    logs = [log.read_text() for log in (run.path / "logs").glob("main-*.log")]
    assert logs
    assert not any("Traceback" in log for log in logs)


def test_a_run_whose_processes_are_killed_equals_one_that_nothing_happens_to(
    start_run: StartRun,
) -> None:
    steps = 6
    undisturbed = start_run(steps=steps, lag=0, workers=1, folder="undisturbed")
    assert undisturbed.finish()[0] == 0
    killed = start_run(steps=steps, lag=0, workers=1, folder="killed")
    killed.wait_for_step(1)
    os.kill(killed.pid_of("main-0"), signal.SIGKILL)
    killed.wait_for_step(3)
    os.kill(killed.pid_of("learner"), signal.SIGKILL)
    status, summary = killed.finish()
    assert status == 0
    assert {"WorkerLost", "LearnerRestarted"} <= {event.kind for event in killed.events}
    assert summary["trajectories"]["consumed"] == steps * 16
    # Sums of float32 differ in their last bits with the number of sequences in a forward pass.
    for ours, theirs in zip(killed.metrics.steps, undisturbed.metrics.steps, strict=True):
        assert (ours.step, ours.reward_mean) == (theirs.step, theirs.reward_mean)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-3)
    accuracies = [
        [each.accuracy for each in run.metrics.evaluations] for run in (killed, undisturbed)
    ]
    assert accuracies[0] == accuracies[1]
    models = [
        AutoModelForCausalLM.from_pretrained(run.path / "model") for run in (killed, undisturbed)
    ]
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_an_interrupted_run_saves_leaves_and_resumes(start_run: StartRun) -> None:
    sinks = "{name: tensorboard}"
    run = start_run(steps=60, sinks=sinks)
    run.wait_for_step(3)
    pids = run.pids()
    run.process.send_signal(signal.SIGINT)
    status, summary = run.finish()
    stopped_at = summary["steps"]
    assert status == 130
    assert 3 <= stopped_at < 60
    assert not any(is_alive(pid) for pid in pids)
    saved = run.path / "checkpoints" / f"step-{stopped_at:08d}"
    assert (saved / "meta.json").exists()
    export = [sys.executable, "-m", "vcpo.cli.main", "export", str(run.path)]
    exported = subprocess.run(export, capture_output=True, text=True, check=True).stdout.strip()
    assert exported == str(run.path / "exports" / f"step-{stopped_at:08d}")
    assert AutoModelForCausalLM.from_pretrained(exported).num_parameters() > 100_000
    status, summary = start_run("--resume", steps=60, sinks=sinks).finish()
    assert status == 0
    assert summary["steps"] == 60
    assert_accounting_is_exact(summary)
    assert summary["trajectories"]["consumed"] == 60 * 16
    shown = tensorboard_scalars(run.path / "tensorboard")["task/reward_mean"]
    assert shown == {
        step.step: pytest.approx(step.reward_mean) for step in run.metrics.steps
    }  # every step once, over both processes


@pytest.mark.parametrize("are_stopped", [False, True])
def test_no_process_outlives_a_killed_host(start_run: StartRun, are_stopped: bool) -> None:
    run = start_run(steps=100_000)
    run.wait_for_step(2)
    pids = [run.pid_of(name) for name in ("learner", "main-0", "main-1")]
    pids += weight_servers(run)
    for pid in pids if are_stopped else ():
        os.kill(pid, signal.SIGSTOP)
    run.process.kill()
    run.process.wait()
    assert len(pids) == 4
    wait_for_exit(pids)
    assert list((run.path / "checkpoints").glob("step-*/meta.json"))  # the learner still saved


def weight_servers(run: LocalRun) -> list[int]:
    """Ids of the processes that sent weights, from the learner's log."""
    log = (run.path / "logs" / "learner.log").read_text()
    return [int(pid) for pid in re.findall(r"process (\d+) sends weights", log)]


def test_a_killed_server_of_weights_is_replaced_and_the_run_goes_on(start_run: StartRun) -> None:
    run = start_run(steps=60)
    run.wait_for_step(3)
    os.kill(weight_servers(run)[0], signal.SIGKILL)
    wait_until(lambda: len(weight_servers(run)) == 2, "another process", run)
    status, summary = run.finish()
    assert (status, summary["steps"]) == (0, 60)
    assert_accounting_is_exact(summary)
    assert "was killed by SIGKILL" in (run.path / "logs" / "learner.log").read_text()
    assert not any(is_alive(pid) for pid in weight_servers(run))


def test_metrics_can_be_scraped_while_a_run_works(start_run: StartRun) -> None:
    run = start_run(steps=100_000)
    run.wait_for_step(2)
    assert min(scrape(run.metrics_port_of("learner"), "vcpo_ess_ratio")) > 0
    # The other worker may have made all the tokens so far.
    port = run.metrics_port_of("main-0")
    wait_until(lambda: sum(scrape(port, "vcpo_rollout_tokens_total")) > 0, "a token", run)


def scrape(port: int, metric: str) -> list[float]:
    """Values of a metric's series, as a scraper reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric}{{")]


FAILING = """
import sys

from vcpo_rollout.environments.sort_digits import SortDigits


class Failing(SortDigits):
    def reward(self, prompt, response):
        if "--worker-id=main-1" in sys.argv:
            raise OSError("no space left on device")
        return super().reward(prompt, response)
"""
"""An environment that fails on one of two workers."""

DISAGREEING = """
import sys

from vcpo_rollout.engines.hf import decoding
from vcpo_rollout.environments.sort_digits import SortDigits as Disagreeing

sample_tokens = decoding.sample_tokens


def sample_tokens_at_another_temperature(*arguments):
    token_ids, logprobs = sample_tokens(*arguments)
    return token_ids, [each - 0.5 for each in logprobs]


if "--worker-id=main-1" in sys.argv:
    decoding.sample_tokens = sample_tokens_at_another_temperature
"""
"""An environment beside which one of two workers reports log-probabilities that are off."""


@pytest.mark.parametrize(
    ("code", "environment", "cause"),
    [
        (FAILING, "failing:Failing", "failing"),
        (DISAGREEING, "disagreeing:Disagreeing", "mismatch"),
    ],
    ids=["failing", "mismatch"],
)
def test_a_worker_with_a_fault_of_its_own_is_replaced_and_the_run_goes_on(
    start_run: StartRun, tmp_path: Path, code: str, environment: str, cause: str
) -> None:
    (tmp_path / f"{environment.partition(':')[0]}.py").write_text(code)
    run = start_run(steps=10_000, environment=f"'{environment}'", workers=3, failures=8)

    def messages(kind: str) -> list[str]:
        return [event.message for event in run.events if event.kind == kind]

    wait_until(lambda: messages("WorkerLost") != [], "a worker that is set aside", run)
    wait_until((run.path / "logs" / "main-3.log").exists, "the worker after it", run)
    run.wait_for_step(run.metrics.steps[-1].step + 5)
    run.process.send_signal(signal.SIGINT)
    status, summary = run.finish()
    assert status == 130
    assert_accounting_is_exact(summary)
    (set_aside,) = messages("WorkerSetAside")
    assert set_aside.startswith(f"main-1: {cause}: ")
    (lost,) = messages("WorkerLost")
    assert lost.startswith(f"main-1 ended with status 77: set aside by the learner: {cause}: ")


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
    run = start_run(environment="'choosy:Choosy'")
    status, summary = run.finish()
    assert status == 1
    assert summary["steps"] == 0
    failure = next(event.message for event in run.events if event.kind == "Failed")
    assert failure.endswith(
        "cannot start: environment.parameters.digits: 5 is too many for a worker"
    )
    assert not any(is_alive(pid) for pid in run.pids())
