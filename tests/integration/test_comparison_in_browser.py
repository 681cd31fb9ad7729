"""Several runs, and a run that goes on, in a real browser."""

import csv
import io
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.integration.report_pages import (
    BROKEN_WORDS,
    PHONE,
    a_step,
    event,
    middle_of,
    ticks,
    write_run,
)
from vcpo.records.journal import Journal
from vcpo.report.comparison import read_runs
from vcpo.report.page import render_comparison, write_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """The comparison of three runs, of 400, 200 and 30 steps."""
    folder = tmp_path_factory.mktemp("compared")
    sizes = {"first-run": 400, "second-run": 200, "third-run": 30}
    runs = [write_run(folder / name, num_steps=size) for name, size in sizes.items()]
    page = render_comparison(read_runs(runs))
    return write_page(folder / "comparison.html", page)


@pytest.fixture
def compared(browser, comparison):
    """A tab with the comparison."""
    page = browser.page()
    page.open(comparison.as_uri())
    yield page
    page.close()


def ends_of_curves(page, chart):
    """Pixel at which each curve of a chart ends."""
    paths = page.all(f"#chart-{chart} g path", "getAttribute('d')")
    return [round(float(re.split("[ML]", path.replace("h0", ""))[-1].split()[0])) for path in paths]


def test_runs_lie_over_each_other_by_step_and_by_time(compared):
    by_step = ends_of_curves(compared, "lag")
    assert by_step[0] > by_step[1] > by_step[2]
    compared.click("[data-x=time]")
    by_time = ends_of_curves(compared, "lag")
    assert by_time[0] > by_time[1] > by_time[2]
    assert ticks(compared)[1] == "2m"


def test_a_run_is_hidden_in_all_charts_at_once(compared):
    compared.click("#chart-reward .entry[data-key='second-run']")
    for chart in ("reward", "accuracy", "lag", "workers"):
        assert len(ends_of_curves(compared, chart)) == 2


def test_a_comparison_says_what_differs_and_marks_the_best(compared):
    assert "second-run is unfinished: 200 of 400 steps." in compared.words(".findings")
    assert compared.words("[data-part=changes]").endswith("The runs have equal specs.")
    best = compared.all(".numbers .best", "dataset.run")
    assert best[0] == "first-run"


def test_a_comparison_can_be_saved(compared):
    rows = list(csv.DictReader(io.StringIO(compared.download("#download-csv"))))
    assert {row["run"] for row in rows} == {"first-run", "second-run", "third-run"}
    assert sum(row["run"] == "third-run" and row["Policy lag"] == "2" for row in rows) == 30


def test_a_comparison_asks_for_nothing_and_the_console_stays_silent(compared, comparison):
    assert compared.requests() == {comparison.as_uri()}
    assert compared.messages() == []


def test_a_comparison_fits_a_phone(compared):
    compared.resize(*PHONE)
    assert compared.ask("document.documentElement.scrollWidth") == PHONE[0]
    assert compared.ask(BROKEN_WORDS) == []
    wide = "[...document.querySelectorAll('.wide')].map((box) => box.scrollWidth - box.clientWidth)"
    assert set(compared.ask(wide)) == {0}


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
