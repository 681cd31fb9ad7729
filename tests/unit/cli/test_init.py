"""`vcpo init`: the files of a new task pass their own test and every check of a run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vcpo.api import load_run
from vcpo.cli.main import app
from vcpo.local.preflight import with_local_paths
from vcpo.service.plugins import import_from_run_folder
from vcpo_rollout.trial import try_environment

TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny"


def vcpo(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


async def test_the_files_of_a_new_task_are_a_run_and_pass_their_own_test(tmp_path, monkeypatch):
    folder = tmp_path / "new"
    made = vcpo("init", "word_sums", "--folder", folder, "--model", TINY)
    assert made.exit_code == 0
    names = ["word_sums.yaml", "word_sums.py", "test_word_sums.py", "word_sums.jsonl"]
    assert made.stdout.split() == [str(folder / name) for name in names]
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = with_local_paths(load_run(folder / names[0]), folder / names[0])
    assert (run.metadata.name, run.spec.model.name) == ("word-sums", str(TINY))
    assert run.spec.environment.parameters == {"path": str(folder / names[3])}
    assert [reward.name for reward in run.spec.environment.rewards] == ["word_sums:reward"]
    import_from_run_folder(run)
    await try_environment(run)
    test = importlib.import_module("test_word_sums")
    checks = [each for name, each in vars(test).items() if name.startswith("test_")]
    assert len(checks) == 2
    for check in checks:
        check()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("Sums", "must be a Python module's name, such as word_problems"),
        ("lambda", "must be a Python module's name"),
        ("random", "is the name of an installed module, which random.py would hide"),
        ("mine", "mine.py exists already; give another name, or remove the file"),
    ],
)
def test_a_name_that_cannot_be_a_task_is_refused_and_nothing_is_written(tmp_path, task, words):
    (tmp_path / "mine.py").write_text("kept")
    refused = vcpo("init", task, "--folder", tmp_path)
    assert refused.exit_code == 2
    assert words in refused.stderr
    assert [each.read_text() for each in tmp_path.iterdir()] == ["kept"]
