"""The report of a run that goes on, in a real browser."""

import os
import signal
import subprocess
import sys

import pytest

from tests.integration.report_pages import a_step, event, middle_of, write_run
from vcpo.records.journal import Journal

pytestmark = pytest.mark.browser


@pytest.fixture
def followed(tmp_path):
    """A run's directory, and `vcpo report --follow` on it as a user starts it."""
    run_dir = write_run(tmp_path / "run", num_steps=30)
    command = [sys.executable, "-m", "vcpo.cli.main", "report", str(run_dir), "--follow"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield run_dir, process
        process.kill()


def test_a_followed_report_updates_without_a_reload_and_ends_with_ctrl_c(browser, followed):
    run_dir, process = followed
    page = browser.page()
    page.open(process.stdout.readline().split()[0])
    assert "Steps 30 of 400" in page.words(".headlines")
    x, y = middle_of(page, "#chart-lag")
    page.drag((x - 40, y), (x + 40, y))
    shown = page.words("#range")
    page.ask("document.body.dataset.kept = 'yes'")
    # The step that is waited for comes last: the page may be read in between.
    Journal(run_dir).event(event(64.0, "WorkerLost", "main-7 is gone"))
    for step in (31, 32):
        Journal(run_dir).step(a_step(step))
    page.ask(UNTIL.replace("CONDITION", "document.body.innerText.includes('Steps\\n32')"))
    assert page.ask("page.data.tables.steps.step.length") == 32
    assert "main-7 is gone" in page.words(".events")
    assert (page.words("#range"), page.ask("document.body.dataset.kept")) == (shown, "yes")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    page.ask(UNTIL.replace("CONDITION", "document.body.innerText.includes('has ended')"))
    page.close()


UNTIL = """new Promise((done) => {
  const look = () => (CONDITION ? done(true) : setTimeout(look, 50));
  document.dispatchEvent(new Event("visibilitychange"));
  look();
})"""
