"""Who can read the files that a process creates."""

import os
import subprocess
import sys

import pytest

from vcpo.service.private_files import keep_files_private, share, shared_files


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.fixture(autouse=True)
def users_umask(monkeypatch):
    """The user's umask is 022, and the process has it again after the test."""
    monkeypatch.delenv("VCPO_USER_UMASK", raising=False)
    before = os.umask(0o022)
    yield
    os.environ.pop("VCPO_USER_UMASK", None)
    os.umask(before)


def test_files_and_folders_are_for_the_user_alone(tmp_path):
    keep_files_private()
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "journal").write_text("an answer")
    os.close(os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR, 0o644))
    assert [mode(tmp_path / each) for each in ("run", "run/logs")] == [0o700, 0o700]
    assert [mode(tmp_path / each) for each in ("run/journal", "lock")] == [0o600, 0o600]


def test_what_others_use_has_the_mode_of_the_users_umask(tmp_path):
    keep_files_private()
    with shared_files():
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "model").touch()
    (tmp_path / "version").touch()
    share(tmp_path / "version")
    (tmp_path / "mine").touch()
    assert [mode(tmp_path / each) for each in ("cache", "cache/model")] == [0o755, 0o644]
    assert [mode(tmp_path / each) for each in ("version", "mine")] == [0o644, 0o600]


def test_a_child_knows_the_users_umask_and_not_its_parents(tmp_path):
    keep_files_private()
    program = (
        "from pathlib import Path\n"
        "from vcpo.service.private_files import keep_files_private, shared_files\n"
        "keep_files_private()\n"
        "Path('mine').touch()\n"
        "with shared_files():\n"
        "    Path('cache').touch()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    assert (mode(tmp_path / "mine"), mode(tmp_path / "cache")) == (0o600, 0o644)


def test_a_process_without_a_run_shares_by_its_own_umask(tmp_path):
    with shared_files():
        (tmp_path / "cache").touch()
    share(tmp_path / "cache")
    assert mode(tmp_path / "cache") == 0o644
