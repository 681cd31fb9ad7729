"""The report in a real browser: it draws itself, answers its reader, and asks for nothing."""

import csv
import io
import json
import zlib
from dataclasses import replace

import pytest

from tests.integration.report_pages import (
    BROKEN_WORDS,
    PHONE,
    a_step,
    event,
    middle_of,
    plot,
    ticks,
    write_run,
)
from vcpo.records.journal import Journal
from vcpo.report import write_report

pytestmark = pytest.mark.browser


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


def column_of(page, chart, label):
    """The values of a curve, as uPlot has them; None if it is hidden."""
    curves = f"page.drawn.find(({{ chart }}) => chart.name === '{chart}').chart.curves"
    index = page.ask(f"{curves}.findIndex((curve) => curve.label === '{label}')") + 1
    drawn = plot(f"chart-{chart}")
    return page.ask(f"{drawn}.series[{index}].show ? {drawn}.data[{index}] : null")


def colors_of(page, chart, *, at_least=20):
    """How many pixels of a chart have each color that no gray is."""
    pixels = page.ask(f"""(() => {{
      const {{ ctx }} = {plot(f"chart-{chart}")};
      const found = {{}};
      const {{ data }} = ctx.getImageData(0, 0, ctx.canvas.width, ctx.canvas.height);
      for (let at = 0; at < data.length; at += 4) {{
        const [red, green, blue, alpha] = data.slice(at, at + 4);
        if (alpha < 255 || Math.max(red, green, blue) - Math.min(red, green, blue) < 40) continue;
        const name = [red, green, blue].map((part) => part.toString(16).padStart(2, "0")).join("");
        found[name] = (found[name] ?? 0) + 1;
      }}
      return found;
    }})()""")
    return {name: count for name, count in pixels.items() if count >= at_least}


def test_the_main_curves_are_drawn_in_their_colors(opened):
    inks = {"reward": "2563c9", "warning": "2563c9", "ess": "2563c9", "lag": "14806a"}
    for name, ink in inks.items():
        assert ink in colors_of(opened, name), name


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


def test_a_value_between_gaps_is_a_dot(browser, tmp_path):
    page = browser.page()
    page.open(write_report(write_run(tmp_path, num_steps=1)).as_uri())
    assert 4 <= colors_of(page, "reward", at_least=1)["2563c9"] <= 16
    page.close()


def test_the_wall_time_includes_the_start(opened):
    assert "Wall time 15m 00s" in opened.words(".headlines")


def test_a_skipped_step_is_a_mark_and_a_gap_and_no_zero(page):
    scale = column_of(page, "step-size", "each step")
    known = page.ask(f"{plot('chart-step-size')}.data[0]")
    assert [known[row] for row, value in enumerate(scale) if value is None] == [150, 300]
    assert {value for value in scale if value is not None} == {0.8}
    assert "c0304a" in colors_of(page, "step-size")
    x, y = middle_of(page, "#chart-step-size")
    offset = page.ask(f"{plot('chart-step-size')}.valToPos(150, 'x')")
    width = page.box("#chart-step-size .u-over")["width"]
    page.mouse("Moved", x - width / 2 + offset, y)
    assert page.words("#readout").startswith("step 150 · 5m skipped: no_gradient")


def test_the_bands_and_the_cells_are_painted(opened):
    cells = colors_of(opened, "ess-by-lag")
    assert {"eda35a", "3d7cc2"} <= cells.keys()  # 0.4 and 0.9 of 1, in eight levels
    band = f"""(() => {{
      const {{ ctx, bbox }} = {plot("chart-warning")};
      const heights = [0.15, 0.5, 0.9].map((share) => bbox.top + share * bbox.height);
      return heights.map((y) => ctx.getImageData(bbox.left + 4, y, 1, 1).data[3] > 0);
    }})()"""
    assert opened.ask(band) == [True, True, False]  # critical, warn, none


def test_a_logarithmic_axis_has_powers_of_ten(opened):
    assert ticks(opened, "#chart-kl-per-token", axis=1) == ["0.001", "0.01", "0.1", "1"]


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
        "step 200 · 6m 40s max 5 p50 2 mean, smoothed 2 lag limit 8 most 8 8"
    )
    shown = "page.drawn.filter(({ figure }) => !figure.hidden)"
    assert page.ask(f"{shown}.every(({{ plot }}) => plot.cursor.left > 0)")


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
    before = column_of(page, "lag", "max")
    page.click(entry)
    assert column_of(page, "lag", "max") is None
    assert "d0651b" not in colors_of(page, "lag")
    assert page.ask(f'document.querySelector("{entry}").getAttribute("aria-pressed")') == "false"
    page.click(entry)
    assert column_of(page, "lag", "max") == before


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
    page.ask("document.querySelector('#chart-lag .plot').focus()")
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
    widths = page.all(
        "figure:not([hidden]) .plot", "clientWidth / one.querySelector('.uplot').clientWidth"
    )
    assert set(widths) == {1}


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


def test_a_dark_page_is_printed_in_light_colors_on_the_width_of_paper(page):
    page.prefer("dark")
    shown = "page.drawn.filter(({ figure }) => !figure.hidden).map(({ plot }) => plot.width)"
    wide = page.ask(shown)
    page.ask("window.dispatchEvent(new Event('beforeprint'))")
    assert set(page.ask(shown)) == {330}
    assert "2563c9" in colors_of(page, "reward")
    page.ask("window.dispatchEvent(new Event('afterprint'))")
    assert page.ask(shown) == wide
    assert "2563c9" not in colors_of(page, "reward")


def test_a_finger_zooms_too(page):
    x, y = middle_of(page, "#chart-lag")
    for kind, at in (("down", x), ("up", x + 60)):
        options = f"{{ pointerType: 'touch', clientX: {at}, clientY: {y}, bubbles: true }}"
        event = f"new PointerEvent('pointer{kind}', {options})"
        page.ask(f"document.querySelector('#chart-lag .u-over').dispatchEvent({event})")
    assert page.words("#range").startswith("steps 200 to 24")


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
    raw = column_of(page, "reward", "each step")
    strokes = [value for value in raw if value is not None]
    assert len(strokes) == 1600  # two ends for each pair of steps
    assert min(strokes) == pytest.approx(0.3, abs=1e-3)
    assert max(strokes) == pytest.approx(0.7, abs=1e-3)
    page.close()


@pytest.mark.parametrize("sizes", [(0.098, 1.0), (1e-300, 1e9, 1e299)])
def test_numbers_of_any_size_are_drawn(browser, tmp_path, sizes):
    run_dir = write_run(tmp_path, num_steps=1)
    journal = Journal(run_dir)
    for step, size in enumerate(sizes, start=2):
        extremes = {"reward_mean": -size, "gradient_norm": size, "dropped": {"lag": 10**step}}
        kl = {"kl_per_token": size}
        journal.step(replace(a_step(step), **extremes, diagnostics=kl))
    page = browser.page()
    page.open(write_report(run_dir).as_uri())
    assert page.messages() == []
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
    parts = [f"[data-part={part}]" for part in ("verdict", "headlines", "findings")]
    order = ["header", *parts, ".toolbar", "#chart-reward", ".events"]
    tops = [opened.box(selector)["y"] for selector in order]
    assert tops == sorted(tops)
    assert (
        opened.ask("document.querySelectorAll('.charts:not(.small) > figure[hidden]').length") == 0
    )
