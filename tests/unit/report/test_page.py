import base64
import hashlib
import json
import math
import re
import time
from html.parser import HTMLParser

import pytest

from tests.fixtures.samples import make_sample
from vcpo.algo.methods import Method
from vcpo.api import run_to_yaml
from vcpo.api.algorithm import Algorithm
from vcpo.records.journal import Journal, Metrics
from vcpo.report import RecordedRun, render_report, write_report
from vcpo.report.page import headlines, recipe

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


def test_responses_are_shown_with_their_rewards(run):
    long = "line\n" * 40
    samples = (make_sample(step=7, response=HOSTILE), make_sample(response=long, reward=-0.25))
    recorded = RecordedRun(run=run, metrics=EMPTY, samples=samples)
    page = Elements(render_report(recorded))
    text = " ".join(page.words)
    assert HOSTILE in text
    assert long in text
    assert all(word in page.words for word in ("7", "-0.25", "2 + 2 =", "1 0"))
    assert not page.tags_named("img")


@pytest.mark.parametrize("method", ["vcpo", "grpo", "dapo", "vtrace"])
def test_the_headline_names_the_recipe_in_force_also_where_the_file_leaves_it_to_the_method(
    run, method
):
    spec = run.spec.model_copy(update={"algorithm": Algorithm(method=method)})
    words = " ".join(
        "".join(Elements(rendered(run.model_copy(update={"spec": spec}))).words).split()
    )
    stages = " · ".join(f"{stage} {value}" for stage, value in recipe(spec.algorithm))
    assert stages in words
    assert "None" not in words.partition("Accuracy")[0]


def test_every_chart_has_a_figure_and_the_other_way_round(run, make_step):
    document = rendered(run, Metrics(steps=(make_step(),), evaluations=()))
    figures = [figure["id"] for figure in Elements(document).tags_named("figure")]
    assert figures[:6] == [
        f"chart-{name}" for name in ("reward", "warning", "ess", "step-size", "lag", "ess-by-lag")
    ]
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


def test_the_page_refers_to_nothing_outside_itself(run, make_step, make_event):
    metrics = Metrics(steps=(make_step(),), evaluations=())
    document = rendered(run, metrics, [make_event("gone")])
    references = [
        value
        for _, attributes in Elements(document).tags
        for name, value in attributes.items()
        if name in {"src", "href", "action", "data", "poster", "srcset"}
    ]
    assert references == ["data:,"]
    words = document.replace("/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "")
    assert not re.search(r"url\((?!#)|@import|https?://|fetch\(|XMLHttpRequest", words)


def test_the_content_policy_allows_exactly_the_style_and_the_script_of_the_page(run):
    document = rendered(run)
    policy = Elements(document).tags_named("meta")[1]["content"]
    for tag in ("style", "script"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", document, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_the_data_of_the_charts_is_json_without_nan(run, make_step):
    steps = (make_step(1), make_step(2, ess_ratio=float("nan"), gradient_norm=float("inf")))
    charts = data_of(rendered(run, Metrics(steps=steps, evaluations=())))["charts"]
    (ess,) = [chart for chart in charts if chart["name"] == "ess"]
    assert ess["curves"][0]["low"] == [0.6, None]


def test_the_report_is_written_from_a_run_directory(run, make_step, make_event, tmp_path):
    (tmp_path / "spec.yaml").write_text(run_to_yaml(run))
    journal = Journal(tmp_path)
    journal.step(make_step())
    journal.event(make_event("gone"))
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    metrics = Metrics(steps=(make_step(),), evaluations=())
    assert path.read_text(encoding="utf-8") == rendered(run, metrics, [make_event("gone")])


def test_a_second_report_replaces_the_first_and_leaves_nothing_beside_it(run, tmp_path):
    (tmp_path / "spec.yaml").write_text(run_to_yaml(run))
    assert write_report(tmp_path) == write_report(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "spec.yaml"]


@pytest.mark.parametrize("method", list(Method))
def test_every_preset_names_its_stages_in_words(method):
    stages = dict(recipe(Algorithm.model_validate({"method": method.value})))
    assert {"method", "aggregation", "baseline", "learning-rate rule"} <= set(stages)
    assert all(value and "None" not in value for value in stages.values())


def metrics_of(*steps, evaluations=()):
    return Metrics(steps=steps, evaluations=tuple(evaluations))


def headline(run, metrics, label, events=()):
    recorded = RecordedRun(run=run, metrics=metrics, events=tuple(events))
    (found,) = [item for item in headlines(recorded) if item.label == label]
    return found.value, found.note


def test_accuracy_is_shown_before_and_after(run, make_evaluation):
    evaluations = [make_evaluation(0, 0.35), make_evaluation(2, 0.5), make_evaluation(4, 0.9)]
    metrics = metrics_of(evaluations=evaluations)
    assert headline(run, metrics, "Accuracy") == ("0.350 → 0.900", "held out, at step 4")


def test_wall_time_includes_the_start_and_leaves_out_the_pause_before_a_resume(
    run, make_step, make_event
):
    events = [
        make_event("", 1000.0, kind="Started"),
        make_event("", 1030.0, kind="Draining"),
        make_event("", 5000.0, kind="Started"),
    ]
    steps = [make_step(1, time_unix_s=1020.0), make_step(2, time_unix_s=5040.0)]
    value, note = headline(run, metrics_of(*steps), "Wall time", events)
    assert (value, note) == ("1m 10s", "200 tokens/s on average, in 2 sessions")


def test_trajectories_name_every_reason_to_drop(run, make_step):
    metrics = metrics_of(make_step(4, leased=1097, consumed=1000, dropped={"lag": 2, "failed": 45}))
    assert headline(run, metrics, "Trajectories consumed") == (
        "1,000",
        "1,097 leased, 47 dropped (failed 45, lag 2)",
    )


def test_lag_is_the_mean_of_means_and_the_largest_maximum(run, make_step):
    steps = [make_step(1, lag_mean=1.0, lag_max=3), make_step(2, lag_mean=2.0, lag_max=7)]
    assert headline(run, metrics_of(*steps), "Lag, mean / max") == ("1.5 / 7", "versions; limit 8")


def test_the_lowest_ess_ratio_is_found_past_steps_without_one(run, make_step):
    without = [make_step(1, ess_ratio=math.nan), make_step(4, ess_ratio=0.0, skipped="nan")]
    steps = [without[0], make_step(2, ess_ratio=0.25), make_step(3), without[1]]
    value = headline(run, metrics_of(*steps), "Lowest ESS ratio")
    assert value == ("0.25", "at step 2; on-policy 0.80")
