import pytest

from vcpo.records.journal import DamagedLine, Journal, Metrics
from vcpo.report.comparison import cautions, read_runs, results, spec_changes
from vcpo.report.recorded_run import MissingRecordsError, RecordedRun
from vcpo.spec import run_to_yaml
from vcpo.spec.algorithm import Algorithm


@pytest.fixture
def recorded(run, make_step):
    """Make a recorded run of 4 steps; `spec` replaces parts of its spec."""

    def recorded(name, *steps, evaluations=(), spec=None, damaged=()):
        changed = run.spec.model_copy(update=spec or {})
        return RecordedRun(
            name=name,
            run=run.model_copy(update={"spec": changed}),
            metrics=Metrics(
                steps=steps or (make_step(4),),
                evaluations=tuple(evaluations),
                damaged=damaged,
            ),
        )

    return recorded


def row_of(runs, label):
    (row,) = [row for row in results(runs) if row.label == label]
    return row.cells, row.best


def test_the_best_of_a_result_is_marked(recorded, make_evaluation):
    runs = [
        recorded("a", evaluations=[make_evaluation(0, 0.3), make_evaluation(4, 0.5)]),
        recorded("b", evaluations=[make_evaluation(4, 0.9)]),
        recorded("c"),
    ]
    assert row_of(runs, "Final accuracy") == (("0.500", "0.900", "-"), {1})


def test_a_low_value_is_best_where_less_is_better(recorded, make_step):
    runs = [
        recorded("a", make_step(4, leased=100, dropped={"lag": 30})),
        recorded("b", make_step(4, leased=100, dropped={"lag": 5})),
    ]
    assert row_of(runs, "Dropped") == (("30.0%", "5.0%"), {1})


def test_equal_results_have_no_best_and_shared_ones_several(recorded, make_step):
    same = [recorded(name, make_step(4, reward_mean=0.5)) for name in "ab"]
    assert row_of(same, "Final reward") == (("0.500", "0.500"), frozenset())
    third = recorded("c", make_step(4, reward_mean=0.2))
    assert row_of([*same, third], "Final reward")[1] == {0, 1}


def test_lag_and_time_have_no_best(recorded, make_step):
    runs = [recorded("a", make_step(4, lag_mean=1.0)), recorded("b", make_step(4, lag_mean=2.0))]
    assert row_of(runs, "Policy lag") == (("1.00", "2.00"), frozenset())


def test_the_final_reward_is_the_mean_of_the_last_ten_steps(recorded, make_step):
    steps = [make_step(at, reward_mean=1.0 if at > 2 else 0.0) for at in range(1, 13)]
    assert row_of([recorded("a", *steps)], "Final reward")[0] == ("1.000",)


def test_skipped_steps_are_a_share(recorded, make_step):
    steps = [make_step(at, skipped="x" if at == 1 else None) for at in range(1, 5)]
    assert row_of([recorded("a", *steps)], "Skipped")[0] == ("25.0%",)


def test_only_fields_that_differ_are_listed(recorded):
    runs = [
        recorded("a", spec={"steps": 4}),
        recorded("b", spec={"steps": 9, "algorithm": Algorithm(maxPolicyLagSteps=3)}),
    ]
    changes = {change.path: change.values for change in spec_changes(runs)}
    assert changes["spec.steps"] == ("4", "9")
    assert changes["spec.algorithm.maxPolicyLagSteps"] == ("8", "3")
    assert "spec.model.name" not in changes


def test_equal_specs_have_no_change(recorded):
    assert spec_changes([recorded("a"), recorded("b")]) == ()


def test_what_makes_a_comparison_hard_is_said(recorded, make_step, make_evaluation, run):
    runs = [
        recorded("short", make_step(3)),
        recorded("fallen", evaluations=[make_evaluation(0, 0.9), make_evaluation(4, 0.1)]),
        recorded("still", *(make_step(at, skipped="no_gradient") for at in range(1, 5))),
        recorded(
            "hurt", damaged=(DamagedLine(file="metrics.jsonl", number=2, cause="half a line"),)
        ),
        recorded(
            "other",
            spec={"environment": run.spec.environment.model_copy(update={"name": "gsm8k"})},
        ),
    ]
    assert cautions(runs) == (
        "short is unfinished: 3 of 4 steps.",
        "fallen collapsed; its own report says when.",
        "No step of still made an update; its own report says why.",
        "The runs have different environments (countdown, gsm8k): rewards do not compare.",
        "hurt: A line of the records is damaged: metrics.jsonl line 2: half a line; it is skipped.",
    )


def test_healthy_runs_of_one_task_need_no_caution(recorded):
    assert cautions([recorded("a"), recorded("b")]) == ()


@pytest.fixture
def make_run_dir(run, make_step, tmp_path):
    def make_run_dir(path):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "spec.yaml").write_text(run_to_yaml(run))
        Journal(tmp_path / path).step(make_step())
        return tmp_path / path

    return make_run_dir


def test_runs_are_named_after_their_directories(make_run_dir):
    names = [each.name for each in read_runs([make_run_dir("a-001"), make_run_dir("a-002")])]
    assert names == ["a-001", "a-002"]


def test_directories_of_one_name_are_told_apart_by_the_folder_above(make_run_dir):
    runs = read_runs([make_run_dir("monday/run"), make_run_dir("friday/run")])
    assert [each.name for each in runs] == ["monday/run", "friday/run"]


def test_a_run_that_is_given_twice_has_two_names(make_run_dir):
    run_dir = make_run_dir("a")
    first, second = (each.name for each in read_runs([run_dir, run_dir]))
    assert (first, second) == (f"{run_dir} (1)", f"{run_dir} (2)")


def test_a_directory_without_a_journal_is_refused_by_name(make_run_dir):
    run_dir = make_run_dir("a")
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(MissingRecordsError, match=r"/a has no metrics\.jsonl, so no journal"):
        read_runs([run_dir, run_dir])


def test_a_directory_without_a_spec_is_refused_by_name(make_run_dir):
    run_dir = make_run_dir("a")
    (run_dir / "spec.yaml").unlink()
    with pytest.raises(MissingRecordsError, match=r"/a has no spec\.yaml, so no run"):
        read_runs([run_dir])


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(MissingRecordsError, match="/nowhere is no directory"):
        read_runs([tmp_path / "nowhere"])
