import base64
import hashlib
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.fixtures.records import make_sample
from vcpo.api import run_to_yaml
from vcpo.records.journal import Journal, Metrics
from vcpo.report import RecordedRun, render_report, write_report
from vcpo.service.run_lock import LockHolder, run_lock

HOSTILE = """'"></style></script><script>alert(1)</script><img src=x onerror=alert(1)>"""
EMPTY = Metrics(steps=(), evaluations=())


def rendered(run, metrics=EMPTY, events=()):
    return render_report(RecordedRun(run=run, metrics=metrics, events=tuple(events)))


def data_of(document):
    """The data of the charts; numbers that are not JSON are refused."""

    def refuse(constant):
        raise AssertionError(constant)

    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', document)[1]
    return json.loads(text, parse_constant=refuse)


class Elements(HTMLParser):
    """Every start tag of a page with its attributes, and the visible text."""

    def __init__(self, document):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(document)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)

    def tags_named(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def test_responses_are_shown_with_the_question_the_right_answer_and_their_rewards(run):
    long = "line\n" * 40
    asked = {"question": "What is 3 + 4?", "answer": "07"}
    samples = (make_sample(step=7, response=HOSTILE), make_sample(response=long, reward=-0.25))
    pair = (make_sample(**asked, response="eight", reward=0.5), make_sample(**asked, step=9))
    recorded = RecordedRun(run=run, metrics=EMPTY, samples=samples, answers=(pair,))
    page = Elements(render_report(recorded))
    text = " ".join(" ".join(page.words).split())
    assert HOSTILE in text
    assert long in " ".join(page.words)
    assert "What is 3 + 4? right answer 07 before reward 0.5 eight after step 9 reward 1 4" in text
    assert all(words in text for words in ("step 7 reward 1", "reward -0.25", "2 + 2 ="))
    assert not page.tags_named("img")


def test_every_chart_has_a_figure_and_the_other_way_round(run, make_step):
    document = rendered(run, Metrics(steps=(make_step(),), evaluations=()))
    figures = [figure["id"] for figure in Elements(document).tags_named("figure")]
    assert figures[:2] == ["chart-reward", "chart-ess"]
    assert figures == [f"chart-{chart['name']}" for chart in data_of(document)["charts"]]


@pytest.fixture
def far_from_greenwich(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_from_greenwich")
def test_events_stand_in_the_log_with_their_time_in_utc(run, make_event):
    words = Elements(rendered(run, EMPTY, [make_event("main-1 is gone", 86_461.0)])).words
    assert {"1970-01-02 00:01:01", "host", "WorkerLost", "main-1 is gone"} <= set(words)


def test_the_spec_can_be_read_with_its_defaults(run):
    assert "maxPolicyLagSteps: 8" in "".join(Elements(rendered(run)).words)


def test_hostile_words_add_no_element_to_the_page(run, make_step, make_event):
    def tags_with(words):
        named = run.model_copy(update={"metadata": run.metadata.model_copy(update={"name": words})})
        step = make_step(skipped=words, dropped={words: 5})
        metrics = Metrics(steps=(step,), evaluations=())
        return [tag for tag, _ in Elements(rendered(named, metrics, [make_event(words)])).tags]

    assert tags_with(HOSTILE) == tags_with("harmless")


def test_the_content_policy_allows_exactly_the_style_and_the_script_of_the_page(run):
    document = rendered(run)
    policy = Elements(document).tags_named("meta")[1]["content"]
    for tag in ("style", "script"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", document, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_the_report_is_written_from_a_run_directory(run, make_step, make_event, tmp_path):
    (tmp_path / "spec.yaml").write_text(run_to_yaml(run))
    journal = Journal(tmp_path)
    journal.step(make_step())
    journal.event(make_event("gone"))
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    page = path.read_text(encoding="utf-8")
    assert "gone" in page
    assert "interrupted at step 1" in page  # nobody holds the directory
    with run_lock(tmp_path, LockHolder.LEARNER):
        assert '"running">running<' in write_report(tmp_path).read_text(encoding="utf-8")


def head_of(run, metrics, events=(), **more):
    recorded = RecordedRun(run=run, metrics=metrics, events=tuple(events), **more)
    body = render_report(recorded).partition("<body>")[2].partition("<main>")[0]
    return " ".join("".join(Elements(body).words).split())


def test_the_head_answers_what_came_of_the_run(run, make_step, make_evaluation, make_event):
    first, last = make_evaluation(0, 0.35), make_evaluation(4, 0.9)
    dropped = {"surplus": 2, "generation_failed": 45}
    end = make_step(4, time_unix_s=1031.0, leased=97, in_flight=2, buffered=3, dropped=dropped)
    metrics = Metrics(steps=(make_step(1), end), evaluations=(first, last))
    events = [make_event("", 1000.0, kind="Started"), make_event("", 1031.0, kind="Complete")]
    assert head_of(run, metrics, events).removeprefix("countdown ") == (
        "complete Held-out reward 0.35 → 0.90 in 4 steps (31s)"
        " more than chance, which is ±0.10 with 128 prompts"
        " 45 of 97 responses failed and were left out with their groups."
        " Fix the cause: the groups left are a biased sample."
        " Not trained on: 2 of 97 responses: more than a batch 2 ·"
        " 45 responses, 200 tokens/s"
    )


def test_an_interrupted_run_says_what_it_reached_and_how_it_goes_on(
    run, make_step, make_evaluation, make_event
):
    events = [
        make_event("", 1000.0, kind="Started"),
        make_event("", 1030.0, kind="Draining"),
        make_event("", 5000.0, kind="Started"),
    ]
    steps = (make_step(1, time_unix_s=1020.0), make_step(2, time_unix_s=5040.0))
    told = head_of(
        run,
        Metrics(steps=steps, evaluations=(make_evaluation(0, 0.35), make_evaluation(1, 0.9))),
        events,
        is_at_work=False,
        run_dir=Path("runs/r-001"),
    )
    told_first = (
        "interrupted at step 2 Held-out reward 0.35 → 0.90 at step 1; 2 of 4 steps (1m 10s)"
    )
    assert told_first in told
    assert "vcpo run runs/r-001/spec.yaml --run-dir runs/r-001 --resume" in told
    assert "in 2 sessions" in told
    assert "trains as it should" not in told


def test_a_failure_is_said_once_with_what_to_do(run, make_step, make_event):
    lost = Metrics(steps=(make_step(dropped={"generation_failed": 45}),), evaluations=())
    events = [
        make_event("no `weights`", kind="GenerationFailed"),
        make_event("spec.steps: no `weights`", kind="Failed"),
    ]
    told = head_of(run, lost, events)
    assert told.count("o weights") == 1
    assert "spec.steps: no weights. Fix this, then resume the run." in told


def test_two_runs_lie_over_each_other_in_inks_of_their_own(run, make_step, make_evaluation):
    records = Metrics(steps=(make_step(),), evaluations=(make_evaluation(0, 0.5),))
    pair = [RecordedRun(run=run, metrics=records, run_dir=Path(name)) for name in ("a", "b")]
    data = data_of(page := render_report(*pair))
    curves = {chart["name"]: chart["curves"] for chart in data["charts"]}
    assert [(one["label"], one["ink"], one["table"]) for one in curves["reward"]] == [
        ("a", "ink-1", "steps 1"),
        ("a, held out", "ink-1", "evaluations 1"),
        ("b", "ink-2", "steps 2"),
        ("b, held out", "ink-2", "evaluations 2"),
    ]
    assert {len(each) for each in curves.values()} == {0, 2, 4}
    assert {each["table"] for chart in curves.values() for each in chart} <= set(data["tables"])
    assert page.count("Held-out reward 0.50 at step 0; 1 of 4 steps") == 2
