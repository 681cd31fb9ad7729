"""The key of a worker's own: random, and kept for a restarted process where a file is named."""

from vcpo_rollout.transport.channels import worker_identity


def test_each_process_has_a_key_of_its_own():
    assert worker_identity(None) != worker_identity(None)


def test_a_restarted_process_shows_the_key_of_the_one_before(tmp_path):
    file = tmp_path / "identity"
    first = worker_identity(file)
    assert worker_identity(file) == first
    assert worker_identity(tmp_path / "another") != first


def test_nobody_else_reads_the_key(tmp_path):
    file = tmp_path / "identity"
    worker_identity(file)
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_process_killed_while_it_wrote_leaves_no_empty_key(tmp_path):
    file = tmp_path / "identity"
    file.touch()
    assert len(worker_identity(file)) >= 43  # 256 bits in base 64
