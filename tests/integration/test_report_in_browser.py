"""The report in a real browser: it draws itself, answers its reader, and asks for nothing."""

import csv
import io
import json
import re
import zlib

import pytest

from tests.integration.report_pages import (
    BROKEN_WORDS,
    PHONE,
    event,
    middle_of,
    ticks,
    write_run,
)
from vcpo.records.journal import Journal
from vcpo.report import write_report

pytestmark = pytest.mark.browser

MAIN = ("reward", "warning", "ess", "step-size", "lag")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(write_run(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture(scope="module")
def opened(browser, report):
    """A tab with the report of the run, for tests that only look."""
    page = browser.page()
    page.open(report.as_uri())
    return page


@pytest.fixture
def page(browser, report):
    """A tab with the report of the run, for tests that act."""
    page = browser.page()
    page.open(report.as_uri())
    yield page
    page.close()


def path_of(page, chart, ink):
    return page.ask(f"document.querySelector('#chart-{chart} g path.{ink}')?.getAttribute('d')")


def test_the_main_curves_are_drawn(opened):
    longest = "Math.max(...[...document.querySelectorAll('#chart-NAME g path')].map(LENGTH))"
    length = "(path) => path.getAttribute('d').length"
    for name in MAIN:
        assert opened.ask(longest.replace("NAME", name).replace("LENGTH", length)) > 1000


def test_the_header_names_the_method_and_its_stages(opened):
    assert opened.words(".setup").endswith(
        "method vcpo · weight sequence · aggregation sequenceMean · baseline opob"
        " · learning-rate rule sqrt"
    )
    assert "None" not in opened.words("header")


def test_the_header_of_another_method_has_no_gap(browser, tmp_path):
    page = browser.page()
    page.open(write_report(write_run(tmp_path, num_steps=1, method="grpo")).as_uri())
    assert "method grpo · weight token · clipping clip · aggregation" in page.words(".setup")
    assert "None" not in page.words("header")
    page.close()


def test_the_wall_time_includes_the_start(opened):
    assert "Wall time 15m 00s" in opened.words(".headlines")


def test_a_skipped_step_is_a_mark_and_a_gap_and_no_zero(opened):
    titles = opened.all("#chart-step-size .mark title", "textContent")
    assert titles == [f"step {step} skipped: no_gradient" for step in (150, 300)]
    trend = opened.ask("document.querySelector('#chart-step-size g path.line').getAttribute('d')")
    assert trend.count("M") == 3
    heights = {float(point.split()[1]) for point in re.split("[ML]", trend.replace("h0", ""))[1:]}
    assert len(heights) == 1


def test_the_bands_and_the_cells_are_drawn(opened):
    assert opened.ask("document.querySelectorAll('#chart-warning .band').length") == 2
    cells = opened.all("#chart-ess-by-lag g .heat", "getAttribute('class')")
    assert cells == ["heat heat-3", "heat heat-7"]


def test_a_logarithmic_axis_has_powers_of_ten(opened):
    labels = opened.all("#chart-kl-per-token .y-tick", "textContent")
    assert labels == ["0.001", "0.01", "0.1", "1"]


def test_a_small_chart_without_numbers_is_left_out(opened):
    assert opened.ask("document.getElementById('chart-surprisal-nats').hidden") is True
    assert opened.ask("document.getElementById('chart-kl-per-token').hidden") is False


def test_a_script_in_a_message_is_not_run(opened):
    assert opened.ask("document.title").strip() == "countdown · VCPO report"


def test_the_page_asks_for_nothing_and_the_console_stays_silent(page, report):
    assert page.requests() == {report.as_uri()}
    assert page.messages() == []


def test_the_log_of_requests_would_tell_on_a_page_that_asks(browser, tmp_path):
    (tmp_path / "asking.html").write_text('<img src="http://127.0.0.1:9/pixel">')
    page = browser.page()
    page.open((tmp_path / "asking.html").as_uri())
    assert "http://127.0.0.1:9/pixel" in page.requests()
    page.close()


def test_pointing_at_a_chart_reads_out_that_step_and_marks_it_everywhere(page):
    page.mouse("Moved", *middle_of(page, "#chart-lag"))
    assert page.words("#readout") == (
        "step 200 · 6m 40s max 5 p50 2 mean, smoothed 2 admission 8 bound 8 8"
    )
    drawn = page.ask("document.querySelectorAll('figure:not([hidden])').length")
    assert page.ask("document.querySelectorAll('.cursor[visibility=visible]').length") == drawn


def test_dragging_zooms_all_charts_and_a_double_click_shows_all(page):
    before = ticks(page)
    x, y = middle_of(page, "#chart-lag")
    page.drag((x, y), (x + 60, y))
    assert page.words("#range").startswith("steps 200 to 24")
    for chart in ("#chart-reward", "#chart-gradient-norm"):
        assert set(ticks(page, chart)) <= {str(step) for step in range(200, 250)}
    page.double_click(*middle_of(page, "#chart-lag"))
    assert ticks(page) == before
    assert page.ask("document.getElementById('show-all').hidden") is True


def test_a_legend_entry_hides_its_curve_and_brings_it_back(page):
    entry = "#chart-lag .entry[data-key='lag/max']"
    before = path_of(page, "lag", "ink-2")
    page.click(entry)
    assert path_of(page, "lag", "ink-2") is None
    assert page.ask(f'document.querySelector("{entry}").getAttribute("aria-pressed")') == "false"
    page.click(entry)
    assert path_of(page, "lag", "ink-2") == before


def test_the_horizontal_axis_can_be_time(page):
    page.click("[data-x=time]")
    assert ticks(page) == ["0s", "2m", "4m", "6m", "8m", "10m", "12m"]
    page.mouse("Moved", *middle_of(page, "#chart-lag"))
    assert page.words("#readout").startswith("step 200 · 6m 40s")


def test_what_is_shown_can_be_saved_as_csv(page):
    x, y = middle_of(page, "#chart-lag")
    page.drag((x, y), (x + 60, y))
    page.click("#chart-lag .entry[data-key='lag/max']")
    rows = list(csv.DictReader(io.StringIO(page.download("#download-csv"))))
    first = rows[0]
    assert (first["step"], first["time_s"]) == ("200", "400")
    assert first["Policy lag: p50"] == "2"
    assert "Policy lag: max" not in first
    assert first["ESS ratio by lag: 2-3"] == "0.4"
    steps = [int(row["step"]) for row in rows if row["Policy lag: p50"]]
    assert steps == list(range(200, 200 + len(steps)))
    assert 30 < len(steps) < 60


def test_what_is_shown_can_be_saved_as_json(page):
    rows = json.loads(page.download("#download-json"))
    (skipped,) = [row for row in rows if row["step"] == 150 and "Policy lag: max" in row]
    assert skipped["Effective learning rate: each step"] is None
    evaluated = [row["Reward: held out"] for row in rows if "Reward: held out" in row]
    assert evaluated == [0, 0.25, 0.5, 0.75, 1]


def test_a_keyboard_reads_out_zooms_and_shows_all(page):
    page.ask("document.querySelector('#chart-lag > svg').focus()")
    page.press("Home")
    assert page.words("#readout").startswith("step 1 ·")
    for key in ("ArrowRight", "PageDown", "ArrowLeft"):
        page.press(key)
    assert page.words("#readout").startswith("step 11 ·")
    page.press("+")
    assert page.words("#range").startswith("steps ")
    page.press("Escape")
    assert (page.words("#range"), page.ask("document.getElementById('readout').hidden")) == (
        "",
        True,
    )


def test_repeated_events_are_one_row_that_opens(page):
    rows = page.all(".events tr .kind", "innerText")
    assert rows == ["Started", "StepSkipped \N{MULTIPLICATION SIGN} 3", "WorkerLost"]
    page.click(".folded summary")
    assert "step 7: the rewards are all equal" in page.words(".folded ul")


def test_a_phone_shows_everything_without_scrolling_sideways_or_breaking_words(page):
    page.resize(*PHONE)
    assert page.ask("document.documentElement.scrollWidth") == PHONE[0]
    assert page.ask(BROKEN_WORDS) == []
    widths = "viewBox.baseVal.width / one.clientWidth"
    assert set(page.all("figure:not([hidden]) > svg", widths)) == {1}


def test_a_phone_shows_events_as_cards(page):
    page.resize(*PHONE)
    assert page.ask("getComputedStyle(document.querySelector('.events thead')).display") == "none"
    time, message = page.box(".events tr .time"), page.box(".events tr .message")
    assert message["y"] > time["y"]
    assert message["width"] > 300


@pytest.mark.parametrize(("scheme", "color"), [("light", "f6f7f9"), ("dark", "10141b")])
def test_the_page_wears_the_reader_s_color_scheme(page, scheme, color):
    page.prefer(scheme)
    assert first_pixel_of(page.picture()).hex() == color


def first_pixel_of(png):
    """Red, green and blue of the upper left corner, which no filter of the format changes."""
    start = png.index(b"IDAT") + 4
    return zlib.decompressobj().decompress(png[start:], 4)[1:]


def test_a_long_run_is_drawn_as_the_envelope_of_its_steps(browser, tmp_path):
    page = browser.page()
    page.open(write_report(write_run(tmp_path, num_steps=1600)).as_uri())
    page.mouse("Moved", *middle_of(page, "#chart-reward"))
    assert "to 0." in page.words("#readout")
    assert page.words("#readout").startswith("steps ")
    raw = path_of(page, "reward", "ink-1")
    assert 780 <= raw.count("V") <= 800  # one for each pair of steps on different pixels
    page.close()


CAUSE = "main-0 cannot start: environment.parameters.digits: 'many' is no number"


@pytest.fixture
def failed(browser, tmp_path):
    """A tab with the report of a run that failed before its first step."""
    (tmp_path / "spec.yaml").write_text((write_run(tmp_path / "other") / "spec.yaml").read_text())
    journal = Journal(tmp_path)
    journal.event(event(0.0, "Started", "countdown: 400 steps"))
    journal.event(event(70.0, "Failed", CAUSE))
    page = browser.page()
    page.open(write_report(tmp_path).as_uri())
    yield page
    page.close()


def test_a_failed_run_begins_with_its_state_and_its_cause(failed):
    assert failed.words(".state") == "failed"
    assert failed.words(".failure") == f"The run failed: {CAUSE}"
    assert failed.box(".failure")["y"] < failed.box(".headlines")["y"]
    red, green, _ = failed.ask(
        "getComputedStyle(document.querySelector('.state')).color.match(/\\d+/g).map(Number)"
    )
    assert red > 2 * green


def test_a_run_without_numbers_has_no_charts_and_nothing_to_zoom(failed):
    shown = "[...document.querySelectorAll('SELECTOR')].filter((one) => one.checkVisibility())"
    for selector in ("figure", ".toolbar", "section:not(.events)"):
        assert failed.ask(f"{shown.replace('SELECTOR', selector)}.length") == 0
    assert failed.ask(f"{shown.replace('SELECTOR', 'section.events')}.length") == 1
    assert failed.messages() == []


def test_a_run_with_numbers_shows_its_charts_below_its_numbers(opened):
    order = ["header", ".headlines", ".findings", ".toolbar", "#chart-reward", ".events"]
    tops = [opened.box(selector)["y"] for selector in order]
    assert tops == sorted(tops)
    assert (
        opened.ask("document.querySelectorAll('.charts:not(.small) > figure[hidden]').length") == 0
    )
