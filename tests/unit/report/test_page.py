import base64
import hashlib
import json
import re
import time
from html.parser import HTMLParser

import pytest

from vcpo.records.journal import Journal, Metrics
from vcpo.records.step_record import CHARTS
from vcpo.report import page, render_report, write_report
from vcpo.spec import SpecError, run_to_yaml
from vcpo.spec.algorithm import Algorithm

HOSTILE = """'"></style></script><script>alert(1)</script><img src=x onerror=alert(1)>"""
EMPTY = Metrics(steps=(), evaluations=())


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


def test_the_report_names_the_run_its_task_and_its_model(run):
    text = " ".join(Elements(render_report(run, EMPTY, ())).words)
    assert all(word in text for word in ("countdown", "models/tiny", "no steps yet"))


@pytest.mark.parametrize(
    ("algorithm", "setup"),
    [
        ({}, "method vcpo · baseline opob · learning-rate rule sqrt"),
        ({"method": "grpo"}, "method grpo · baseline grpo · learning-rate rule none"),
        (
            {"baseline": "groupMean", "baselineScope": "batch", "learningRateRule": "linear"},
            "method vcpo · baseline groupMean, one per batch · learning-rate rule linear",
        ),
    ],
)
def test_the_headline_names_what_is_in_force_also_where_the_file_leaves_it_to_the_method(
    run, algorithm, setup
):
    spec = run.spec.model_copy(update={"algorithm": Algorithm.model_validate(algorithm)})
    page = render_report(run.model_copy(update={"spec": spec}), EMPTY, ())
    assert setup in " ".join("".join(Elements(page).words).split())


def test_the_report_has_the_four_curves_and_the_details(run, make_step):
    metrics = Metrics(steps=(make_step(),), evaluations=())
    names = [
        figure["id"] for figure in Elements(render_report(run, metrics, ())).tags_named("figure")
    ]
    assert names == [
        *("chart-reward", "chart-ess", "chart-step-size", "chart-lag"),
        *(f"chart-{field}" for field, _ in CHARTS),
        "chart-queue",
    ]


@pytest.fixture
def far_from_greenwich(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_from_greenwich")
def test_events_stand_in_the_log_with_their_time_in_utc(run, make_event):
    words = Elements(render_report(run, EMPTY, [make_event("main-1 is gone", 86_461.0)])).words
    assert {"1970-01-02 00:01:01", "host", "WorkerLost", "main-1 is gone"} <= set(words)


def test_of_many_events_the_newest_are_listed(run, make_event):
    events = [make_event(f"message {number}") for number in range(page.MAX_EVENTS + 1)]
    words = Elements(render_report(run, EMPTY, events)).words
    assert "message 0" not in words
    assert "message 1" in words
    assert "the newest 500 of 501, UTC" in "".join(words)


def test_the_spec_can_be_read_with_its_defaults(run):
    assert "maxPolicyLagSteps: 8" in "".join(Elements(render_report(run, EMPTY, ())).words)


def test_hostile_words_add_no_element_to_the_page(run, make_step, make_event):
    def tags_with(words):
        named = run.model_copy(update={"metadata": run.metadata.model_copy(update={"name": words})})
        step = make_step(skipped=words, dropped={words: 5})
        metrics = Metrics(steps=(step,), evaluations=())
        return [tag for tag, _ in Elements(render_report(named, metrics, [make_event(words)])).tags]

    assert tags_with(HOSTILE) == tags_with("harmless")


def test_hostile_words_are_still_shown(run, make_event):
    assert HOSTILE in Elements(render_report(run, EMPTY, [make_event(HOSTILE)])).words


def test_the_page_refers_to_nothing_outside_itself(run, make_step, make_event):
    metrics = Metrics(steps=(make_step(),), evaluations=())
    document = render_report(run, metrics, [make_event("gone")])
    references = [
        value
        for _, attributes in Elements(document).tags
        for name, value in attributes.items()
        if name in {"src", "href", "action", "data", "poster", "srcset"}
    ]
    assert references == ["data:,"]
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttpRequest", document)


def test_the_content_policy_allows_exactly_the_style_and_the_script_of_the_page(run):
    document = render_report(run, EMPTY, ())
    policy = Elements(document).tags_named("meta")[1]["content"]
    for tag in ("style", "script"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", document, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_the_readout_of_every_chart_is_json_without_nan(run, make_step):
    steps = (make_step(1), make_step(2, ess_ratio=float("nan"), gradient_norm=float("inf")))
    document = render_report(run, Metrics(steps=steps, evaluations=()), ())

    def refuse(constant):
        raise AssertionError(constant)

    readouts = [
        json.loads(figure["data-readout"], parse_constant=refuse)
        for figure in Elements(document).tags_named("figure")
    ]
    ess_ratio = readouts[1]["series"][0]
    assert (ess_ratio["x"], ess_ratio["y"]) == ([1], [0.6])


def test_a_report_depends_on_nothing_but_its_arguments(run, make_step, make_event):
    metrics = Metrics(steps=(make_step(),), evaluations=())
    events = [make_event("gone")]
    assert render_report(run, metrics, events) == render_report(run, metrics, events)


def test_the_report_is_written_from_a_run_directory(run, make_step, make_event, tmp_path):
    (tmp_path / "spec.yaml").write_text(run_to_yaml(run))
    journal = Journal(tmp_path)
    journal.step(make_step())
    journal.event(make_event("gone"))
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    metrics = Metrics(steps=(make_step(),), evaluations=())
    assert path.read_text(encoding="utf-8") == render_report(run, metrics, [make_event("gone")])


def test_a_second_report_replaces_the_first_and_leaves_nothing_beside_it(run, tmp_path):
    (tmp_path / "spec.yaml").write_text(run_to_yaml(run))
    assert write_report(tmp_path) == write_report(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "spec.yaml"]


def test_a_directory_without_a_spec_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"spec\.yaml"):
        write_report(tmp_path)
