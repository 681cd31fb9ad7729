import pytest

from vcpo.algo.methods import Method
from vcpo.api.algorithm import Algorithm
from vcpo.report.page import recipe


def words_of(**fields):
    return [f"{stage} {value}" for stage, value in recipe(Algorithm.model_validate(fields))]


def test_the_stages_of_vcpo():
    stages = ["weight sequence", "aggregation sequenceMean"]
    assert words_of(method="vcpo") == [
        "method vcpo",
        *stages,
        "baseline opob",
        "learning-rate rule sqrt",
    ]
    assert words_of() == [
        "method vcpo2",
        *stages,
        "baseline pessimistic, one per batch",
        "learning-rate rule trustRegion",
    ]


def test_a_stage_that_the_file_replaces_is_the_one_in_force():
    assert {"baseline groupMean, one per batch", "learning-rate rule linear"} <= set(
        words_of(baseline="groupMean", baselineScope="batch", learningRateRule="linear")
    )


def test_dapo_filters_and_clips():
    assert {"filter informative", "clipping clip", "aggregation tokenMean"} <= set(
        words_of(method="dapo")
    )


@pytest.mark.parametrize("method", list(Method))
def test_every_preset_names_its_stages_in_words(method):
    stages = dict(recipe(Algorithm.model_validate({"method": method.value})))
    assert {"method", "aggregation", "baseline", "learning-rate rule"} <= set(stages)
    assert all(value and "None" not in value for value in stages.values())
