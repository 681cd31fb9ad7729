"""Which commits `.ci/run` looks at, in real repositories, and what it says of them."""

from __future__ import annotations

import subprocess

import pytest

from scripts.commit_subjects import NEWEST, commits, main

LONG = "x" * 73


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


def commit(folder, *subjects):
    for subject in subjects:
        git(folder, "commit", "--quiet", "--allow-empty", "-m", subject)


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    return folder


def subjects(folder):
    return [subject for _, subject in commits(folder)]


def test_on_a_branch_only_its_own_commits_are_looked_at(repository, capfd):
    commit(repository, LONG)
    git(repository, "switch", "--quiet", "--create", "work")
    commit(repository, "One", "Two")
    assert subjects(repository) == ["Two", "One"]
    assert main(repository) == 0
    commit(repository, LONG)
    assert main(repository) == 1
    assert "a subject of 73 characters, and 72 fit; say what changed" in capfd.readouterr().err


def test_on_main_the_newest_are(repository):
    commit(repository, LONG, *["Short"] * NEWEST)
    assert subjects(repository) == ["Short"] * NEWEST
    assert main(repository) == 0


def test_a_shallow_clone_shows_what_it_has(repository, tmp_path):
    commit(repository, LONG, "Two", "Three")
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repository}", "shallow")
    assert subjects(tmp_path / "shallow") == ["Three"]


def test_a_folder_without_history_passes(tmp_path, repository):
    assert main(repository) == 0
    assert main(tmp_path) == 0
