"""The report in a real browser: it draws itself, its script runs, and it asks for nothing."""

import json
import math
import os
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser

import pytest

from vcpo.records.journal import EvaluationRecord, EventRecord, Journal
from vcpo.records.step_record import CHARTS, StepRecord
from vcpo.report import write_report

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 120
SPEC = """
apiVersion: vcpo.dev/v1alpha1
kind: VCPORun
metadata: {name: countdown}
spec:
  model: {name: models/tiny}
  environment: {name: countdown}
  steps: 400
"""


@pytest.fixture(scope="module")
def chromium():
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None and os.environ.get("CI") == "true":
        pytest.fail(f"CI must have a browser: none of {', '.join(NAMES)} is on the PATH")
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH")
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a run of 400 steps, two of them skipped."""
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "spec.yaml").write_text(SPEC)
    journal = Journal(run_dir)
    for step in range(1, 401):
        journal.step(step_record(step))
    for step in range(0, 401, 100):
        journal.evaluation(evaluation_record(step))
    message = "<script>document.title = 'owned'</script> is gone"
    journal.event(EventRecord(time_unix_s=9.0, source="host", kind="WorkerLost", message=message))
    return write_report(run_dir)


def step_record(step):
    skipped = "loss is not finite" if step in {150, 300} else None
    return StepRecord(
        step=step,
        time_unix_s=float(step),
        reward_mean=0.5 + 0.2 * math.sin(step),
        ess_ratio=math.nan if skipped else 0.6,
        on_policy_ess_ratio=0.9,
        learning_rate_scale=0.8,
        learning_rate=8e-7,
        gradient_norm=math.inf if skipped else 1.0,
        importance_weight_max=2.0,
        lag_mean=2.0,
        lag_p50=2,
        lag_max=5,
        response_tokens_mean=10.0,
        step_s=1.0,
        idle_s=0.1,
        tokens_per_s=100.0,
        admission_lag_steps=8,
        workers=2,
        leased=10,
        in_flight=4,
        buffered=3,
        consumed=3,
        skipped=skipped,
    )


def evaluation_record(step):
    return EvaluationRecord(
        step=step,
        time_unix_s=float(step),
        accuracy=step / 400,
        num_trajectories=128,
        policy_version_min=step,
        policy_version_max=step,
    )


@pytest.fixture(scope="module")
def browse(chromium, tmp_path_factory):
    def browse(page, *flags):
        """Open a page; return what the browser printed and the log of its network."""
        scratch = tmp_path_factory.mktemp("browser")
        network_log = scratch / "network.json"
        command = [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *(
                "--disable-sync",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={scratch / 'profile'}",
            ),
            *("--enable-logging=stderr", "--hide-scrollbars", "--window-size=1280,1700"),
            *(f"--log-net-log={network_log}", *flags, page.as_uri()),
        ]
        done = subprocess.run(
            command, capture_output=True, timeout=TIMEOUT_S, check=True, text=True
        )
        return done.stdout, done.stderr, network_log.read_text()

    return browse


@pytest.fixture(scope="module")
def visit(browse, report):
    return browse(report, "--dump-dom")


class Page(HTMLParser):
    """The parts of a page that the tests ask about."""

    def __init__(self, document):
        super().__init__()
        self.charts, self.curves, self.root, self.title = [], {}, {}, ""
        self._in_title = False
        self.feed(document)

    def handle_starttag(self, tag, attributes):
        fields = dict(attributes)
        self._in_title = tag == "title" and not self.charts
        if tag == "html":
            self.root = fields
        elif tag == "figure":
            self.charts.append(fields["id"])
        elif tag == "path" and self.charts and "ink-" in fields.get("class", ""):
            self.curves.setdefault(self.charts[-1], []).append(fields["d"])

    def handle_data(self, data):
        if self._in_title:
            self.title += data


def requests_of_page(network_log):
    """Addresses beyond the file that the page asked for; the browser's own have no origin."""
    asked = (event.get("params", {}) for event in json.loads(network_log)["events"])
    return {
        params["url"]
        for params in asked
        if params.get("initiator", "not an origin") != "not an origin"
        and not params["url"].startswith(("file:", "data:"))
    }


def test_the_four_curves_are_drawn(visit):
    page = Page(visit[0])
    for name in ("chart-reward", "chart-ess", "chart-step-size", "chart-lag"):
        assert max(len(path) for path in page.curves[name]) > 1000


def test_the_script_of_the_page_has_run_to_its_end(visit):
    page = Page(visit[0])
    assert page.root["data-charts"] == str(len(page.charts)) == str(5 + len(CHARTS))


def test_a_script_in_a_message_is_not_run(visit):
    assert Page(visit[0]).title.strip() == "countdown · VCPO report"


def test_the_console_stays_silent(visit):
    assert [line for line in visit[1].splitlines() if "CONSOLE" in line] == []


def test_nothing_but_the_file_itself_is_asked_for(visit):
    assert requests_of_page(visit[2]) == set()


def test_the_log_of_the_network_would_tell_on_a_page_that_asks(browse, tmp_path):
    page = tmp_path / "asking.html"
    page.write_text('<img src="http://127.0.0.1:9/pixel">')
    assert requests_of_page(browse(page, "--dump-dom")[2]) == {"http://127.0.0.1:9/pixel"}


def test_pointing_at_a_chart_reads_out_that_step_and_marks_it_everywhere(browse, report, tmp_path):
    pointing = """<script>
      const chart = document.querySelector("#chart-lag > svg");
      const box = chart.getBoundingClientRect();
      const middle = box.left + (box.width * (46 + 548)) / 2 / 560;
      chart.dispatchEvent(new PointerEvent("pointermove", {clientX: middle, clientY: box.top}));
    </script>"""
    page = tmp_path / "pointing.html"
    without_policy = re.sub("<meta http-equiv=[^>]*>", "", report.read_text(encoding="utf-8"))
    page.write_text(without_policy.replace("</body>", pointing + "</body>"), encoding="utf-8")
    document = browse(page, "--dump-dom")[0]
    readout = document.partition('<div id="readout"')[2].partition("</div>")[0]
    words = " ".join(re.sub("<[^>]*>", " ", readout).split())
    assert words.endswith("step 200 max 5 p50 2 mean, smoothed 2 bound 8 8")
    assert document.count('visibility="visible"') == 5 + len(CHARTS)


@pytest.mark.parametrize(
    ("scheme", "preference", "color"), [("light", 1, "f6f7f9"), ("dark", 0, "10141b")]
)
def test_the_page_wears_the_reader_s_color_scheme(
    browse, report, tmp_path, scheme, preference, color
):
    picture = tmp_path / f"{scheme}.png"
    browse(report, f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={preference}")
    assert first_pixel_of(picture.read_bytes()).hex() == color


def first_pixel_of(png):
    """Red, green and blue of the upper left corner, which no filter of the format changes."""
    start = png.index(b"IDAT") + 4
    return zlib.decompressobj().decompress(png[start:], 4)[1:]
