"""The command line as a user meets it: what is printed where, and the exit status."""

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import vcpo as package
from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.models import QWEN_1_5B, write_model
from tests.fixtures.records import STEP
from vcpo.api import GpuUse, json_schema, load_run
from vcpo.cli.main import app
from vcpo.local.preflight import with_local_paths
from vcpo.local.run_dir import RunDir, new_run_dir
from vcpo.local.terminal.summary import Ending, RunOutcome
from vcpo.records.exported_model import ExportedModel, ExportKind
from vcpo.records.journal import Journal
from vcpo.service.plugins import import_from_run_folder
from vcpo_rollout.trial import try_environment

USER_ERROR = 2
RUN = """
metadata: {name: countdown}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 400
  algorithm: {maxPolicyLagSteps: 12}
"""
SHORT = "  sampling: {maxNewTokens: 32}\n"


def vcpo(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """A run's file with its model beside it."""
    monkeypatch.setenv("VCPO_FORK", "0")  # it would fork the process of the tests
    write_model(tmp_path / "m")
    path = tmp_path / "run.yaml"
    path.write_text(RUN, encoding="utf-8")
    return path


INTERRUPTS_ITSELF = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
"""


def test_an_interrupt_while_modules_are_imported_leaves_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text(INTERRUPTS_ITSELF)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", "from vcpo.cli import command; command()"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (130, b"")


class TestHelp:
    def test_the_version_is_that_of_the_package(self):
        assert vcpo("--version").stdout == f"vcpo {package.__version__}\n"


class TestValidate:
    def test_what_was_found_of_a_run_is_said(self, tmp_path, monkeypatch):
        no_gpu = GpuUse(learner=False, groups=frozenset(), has_vllm=False)
        monkeypatch.setattr("vcpo.cli.main.local_gpu_use", lambda spec: no_gpu)
        (tmp_path / "run.yaml").write_text(RUN.replace("{name: m}", f"{{name: {TINY}}}") + SHORT)
        found = vcpo("validate", tmp_path / "run.yaml").stdout
        for line in (
            "steps     400 of 16 prompts x 8 responses: 6,400 prompts in all; lag at most 12",
            "held out  128 prompts every 25 steps",
            "workers   main: engine hf (no GPU is here), float32 on the CPU, up to 1",
            "learner   float32 on the CPU",
            "memory    0.21 M parameters; at most learner 0.0031 GiB, each worker 0.00078 GiB",
        ):
            assert f"\n{line}" in found

    def test_a_model_with_its_config_alone_is_refused_after_the_plan_of_a_step(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        (tmp_path / "config.json").write_text(json.dumps(QWEN_1_5B))
        asked = vcpo("validate", "examples/qwen_one_gpu.yaml", f"--set=model.name={tmp_path}")
        assert re.search(r"^tokens +37,812 in .*\nseconds +7\.24 for 128 ", asked.stdout, re.M)
        assert (asked.exit_code, "has no model.safetensors" in asked.stderr) == (USER_ERROR, True)

    def test_rows_are_counted(self, run_file, tmp_path):
        rows = "".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(50))
        (tmp_path / "rows.jsonl").write_text(rows)
        task = "{name: data_set, parameters: {path: rows.jsonl}}"
        run_file.write_text(RUN.replace("{name: countdown}\n  steps", f"{task}\n  steps"))
        assert re.search(
            r"rows +4\d to train on \(1[34]\d\.\d epochs\), \d held out; all distinct",
            vcpo("validate", run_file).stdout,
        )

    def test_a_further_file_and_changes_lie_over_the_first(self, run_file, tmp_path):
        (tmp_path / "more.yaml").write_text("spec: {algorithm: {maxPolicyLagSteps: 5}}")
        for more, lag in ((tmp_path / "more.yaml", 5), ("--set=algorithm.maxPolicyLagSteps=3", 3)):
            assert f"lag at most {lag} versions" in vcpo("validate", run_file, more).stdout

    def test_a_learner_that_needs_a_gpu_and_asks_a_cluster_for_none_is_warned_about(self, run_file):
        run_file.write_text(RUN + "  learner: {precision: bfloat16}\n", encoding="utf-8")
        assert vcpo("validate", run_file).stderr == (
            "warning: in a cluster: The learner asks for no GPU, and its precision 'bfloat16' is"
            " for GPUs: set `learner.gpusPerReplica`.\n"
        )

    def test_brackets_in_a_message_are_printed_as_they_are(self, run_file):
        run_file.write_text(RUN + "  rollouts: [{name: '[red]'}]\n", encoding="utf-8")
        assert "spec.rollouts[0].name" in vcpo("validate", run_file).stderr


def complete_run(run_file, path, *, step):
    """The directory of a run that has left its model after `step` steps."""
    directory = RunDir(path)
    directory.create(with_local_paths(load_run(run_file), run_file))
    Journal(path).step(STEP)
    directory.model.mkdir()
    exported = ExportedModel(
        kind=ExportKind.MODEL, run="countdown", step=step, base_model="m", parameters=9
    )
    exported.write(directory.model)
    return directory


class TestRun:
    def test_a_run_that_is_complete_is_so_at_once_and_nothing_is_started(self, run_file, tmp_path):
        directory = complete_run(run_file, tmp_path / "used", step=400)
        asked = vcpo("run", run_file, "--run-dir", directory.path, "--resume", "--json")
        assert (asked.exit_code, asked.stderr) == (0, "")
        first, second = asked.stdout.splitlines()
        assert first.startswith(
            f"already complete: 400 steps; the model is in {directory.model}. To continue,"
        )
        assert json.loads(second)["steps"] == STEP.step
        assert list(directory.processes.iterdir()) == list(directory.logs.iterdir()) == []

    def test_a_run_that_wants_more_steps_than_its_model_has_is_not(
        self, run_file, tmp_path, monkeypatch
    ):
        directory = complete_run(run_file, tmp_path / "used", step=399)
        monkeypatch.setattr("vcpo.cli.run_file.missing_packages", lambda modules: "started")
        asked = vcpo("run", run_file, "--run-dir", directory.path, "--resume")
        assert (asked.exit_code, asked.stderr) == (USER_ERROR, "started\n")

    def test_a_report_without_room_changes_nothing_about_the_end_of_its_run(
        self, run_file, tmp_path, monkeypatch
    ):

        def trained(loaded, directory, options):
            directory.create(loaded)
            return RunOutcome(ending=Ending.COMPLETE)

        monkeypatch.setattr("vcpo.cli.main._train", trained)
        with files_of_at_most(5_000):
            asked = vcpo("run", run_file, "--run-dir", tmp_path / "new", "--json")
        assert asked.exit_code == 0
        assert asked.stderr.startswith(f"report: not written, File too large ({tmp_path / 'new'});")
        assert json.loads(asked.stdout.splitlines()[-1])["steps"] == 0
        assert not list((tmp_path / "new").glob("report*"))

    @pytest.mark.parametrize(
        ("has_checkpoint", "changes"), [(True, ()), (False, ()), (True, ("--steps", "7"))]
    )
    def test_after_an_interrupt_the_last_words_are_true(
        self, run_file, tmp_path, monkeypatch, has_checkpoint, changes
    ):
        new = tmp_path / "new"

        def interrupted(loaded, directory, options):
            directory.create(loaded)
            Journal(directory.path).step(STEP)
            if has_checkpoint:
                saved = directory.path / "checkpoints" / "step-00000001"
                saved.mkdir(parents=True)
                (saved / "meta.json").touch()
            return RunOutcome(ending=Ending.INTERRUPTED)

        monkeypatch.setattr("vcpo.cli.main._train", interrupted)
        asked = vcpo("run", run_file, "--run-dir", new, *changes)
        assert asked.exit_code == Ending.INTERRUPTED
        if has_checkpoint:
            assert f"`vcpo export {new}` writes the model of step 1." in asked.stdout
        else:
            assert "There is no checkpoint, so `vcpo export` has no model to" in asked.stdout
        resumed = new / "spec.yaml" if changes else run_file
        assert f"`vcpo run {resumed} --run-dir {new} --resume`" in asked.stdout
        assert load_run(new / "spec.yaml").spec.steps == (7 if changes else 400)

    def test_a_further_interrupt_does_not_cut_off_the_last_words(
        self, run_file, tmp_path, monkeypatch
    ):
        def interrupted(loaded, directory, options):
            directory.create(loaded)
            return RunOutcome(ending=Ending.INTERRUPTED)

        def report(directory):
            os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr("vcpo.cli.main._train", interrupted)
        monkeypatch.setattr("vcpo.cli.main._report", report)
        before = signal.getsignal(signal.SIGINT)
        asked = vcpo("run", run_file, "--run-dir", tmp_path / "new")
        assert asked.exit_code == Ending.INTERRUPTED
        assert "--resume` goes on after step 0." in asked.stdout
        assert signal.getsignal(signal.SIGINT) == before

    def test_a_directory_with_records_and_no_spec_wants_another_one(self, run_file, tmp_path):
        (tmp_path / "metrics.jsonl").touch()
        asked = vcpo("run", run_file, "--run-dir", tmp_path)
        assert (asked.exit_code, asked.stdout) == (USER_ERROR, "")
        assert asked.stderr == (
            f"--run-dir: {tmp_path} already has a run; give another directory\n"
        )

    def test_another_run_is_not_continued_and_nothing_is_written(self, run_file, tmp_path):
        used = tmp_path / "used"
        used.mkdir()
        (used / "spec.yaml").write_text(
            run_file.read_text().replace("model: {name: m}", "model: {name: other}")
        )
        before = (used / "spec.yaml").read_bytes()
        asked = vcpo("run", run_file, f"--run-dir={used}", "--resume")
        assert asked.exit_code == 2
        assert asked.stderr.splitlines() == [
            f"--resume: these changes are not possible for a run of {used}:",
            f"  spec.model.name: 'other' -> '{run_file.parent / 'm'}'",
            f"undo them, resume with {used / 'spec.yaml'}, or give another directory",
        ]
        assert (used / "spec.yaml").read_bytes() == before

    def test_a_run_that_has_taken_more_steps_is_not_cut(self, run_file, tmp_path):
        used = complete_run(run_file, tmp_path / "used", step=400)
        Journal(used.path).step(replace(STEP, step=158))
        before = used.spec.read_bytes()
        asked = vcpo("run", run_file, f"--run-dir={used.path}", "--resume", "--steps", "157")
        assert (asked.exit_code, used.spec.read_bytes()) == (USER_ERROR, before)
        said = "--resume: spec.steps is 157, and the run has taken 158 steps; give 158 or more"
        assert asked.stderr.startswith(said)

    @pytest.fixture
    def taken_port(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server.getsockname()[1]

    def test_a_start_that_fails_leaves_no_directory_and_its_number_to_the_next(
        self, run_file, tmp_path, monkeypatch, taken_port
    ):
        monkeypatch.chdir(tmp_path)
        for _ in range(2):
            asked = vcpo("run", run_file, f"--metrics-port={taken_port}")
            assert (asked.exit_code, asked.stdout) == (USER_ERROR, "")
        started = []
        monkeypatch.setattr(
            "vcpo.cli.main.with_kv_cache", lambda run, _: started.append(run) or run
        )
        with files_of_at_most(1_000):
            asked = vcpo("run", run_file)
        assert started
        assert asked.stderr == (
            "--run-dir: runs/countdown-001 cannot be written (File too large); give a writable"
            " directory\n"
        )
        assert new_run_dir("countdown", tmp_path / "runs").path.name == "countdown-001"
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize("content", [None, [], ["notes.txt"], ["metrics.jsonl"]], ids=str)
    def test_resume_wants_the_directory_of_a_run_and_makes_none(
        self, run_file, tmp_path, monkeypatch, content
    ):
        monkeypatch.setattr("vcpo.cli.run_file.missing_packages", lambda modules: "started")
        place = tmp_path / "mistyped"
        if content is not None:
            place.mkdir()
            for name in content:
                (place / name).touch()
        asked = vcpo("run", run_file, "--run-dir", place, "--resume")
        assert (asked.exit_code, asked.stdout) == (USER_ERROR, "")
        why = "has no spec.yaml" if place.exists() else "does not exist"
        assert asked.stderr == (
            f"--resume: {place} {why}, so there is no run to resume; give the directory that `vcpo"
            " run` printed as --run-dir, or leave out both options to start a new run\n"
        )
        left = sorted(each.name for each in place.iterdir()) if place.exists() else None
        assert left == content

    def test_a_gpu_decides_formats_and_engines_that_the_file_leaves_open(
        self, run_file, tmp_path, monkeypatch
    ):
        started = []

        def train(loaded, directory, options):
            started.append(loaded.spec)
            return RunOutcome(ending=Ending.FAILED)

        use = GpuUse(learner=True, groups=frozenset({"main"}), has_vllm=False)
        monkeypatch.setattr("vcpo.cli.main._train", train)
        monkeypatch.setattr("vcpo.cli.main.local_gpu_use", lambda spec: use)
        told = vcpo("run", run_file, "--run-dir", tmp_path / "new").stderr
        (spec,) = started
        (group,) = spec.rollouts
        assert (spec.learner.precision, group.precision, group.engine) == (
            "bfloat16",
            "bfloat16",
            "hf",
        )
        assert told.startswith("warning: spec.rollouts[0].engine: 'hf' is used, because vLLM")


def test_the_schema_is_printed_as_json():
    asked = vcpo("schema")
    assert asked.exit_code == 0
    assert json.loads(asked.stdout) == json_schema()


TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny"


async def test_the_files_of_a_new_task_are_a_run_and_pass_their_own_test(tmp_path, monkeypatch):
    folder = tmp_path / "new"
    made = vcpo("init", "word_sums", "--folder", folder, "--model", TINY)
    assert made.exit_code == 0
    names = ["word_sums.yaml", "word_sums.py", "test_word_sums.py", "word_sums.jsonl"]
    *written, then = made.stdout.splitlines()
    assert written == [str(folder / name) for name in names]
    assert then.endswith(f"then: vcpo try {folder / 'word_sums.yaml'}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = with_local_paths(load_run(folder / names[0]), folder / names[0])
    assert (run.metadata.name, run.spec.model.name) == ("word-sums", str(TINY))
    assert run.spec.environment.parameters == {"path": str(folder / names[3])}
    assert [reward.name for reward in run.spec.environment.rewards] == ["word_sums:reward"]
    import_from_run_folder(run)
    assert await try_environment(run) == ()  # nothing repeats, and enough is held out
    test = importlib.import_module("test_word_sums")
    checks = [each for name, each in vars(test).items() if name.startswith("test_")]
    assert len(checks) == 2
    for check in checks:
        check()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("lambda", "must be a Python module's name"),
        ("mine", "mine.py exists already; give another name, or remove the file"),
    ],
)
def test_a_name_that_cannot_be_a_task_is_refused_and_nothing_is_written(tmp_path, task, words):
    (tmp_path / "mine.py").write_text("kept")
    refused = vcpo("init", task, "--folder", tmp_path)
    assert refused.exit_code == 2
    assert words in refused.stderr
    assert [each.read_text() for each in tmp_path.iterdir()] == ["kept"]
