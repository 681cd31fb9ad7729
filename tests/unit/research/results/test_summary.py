"""What belongs to which part of the small study, and its headline."""

from __future__ import annotations

import pytest

from research.results.summary import has_variance_control, headline, headline_lag, summarize
from tests.fixtures.study import STUDY, record, study, study_document, with_more_seeds

TUNING = [
    record("vcpo", 0, [0.2, 0.8], seed=101, learning_rate=1e-4),
    record("vcpo", 0, [0.8, 0.8], seed=101, learning_rate=1e-3),
    record("plain", 0, [0.6, 0.8], seed=101, learning_rate=1e-4),
    record("plain", 0, [0.2, 0.6], seed=101, learning_rate=1e-3),
]
"""The target is 0.76, the synchronous rate of vcpo 1e-3 and that of plain 1e-4."""


def claimed(method, lag, accuracies, *, seed=3):
    rate = {"vcpo": 1e-3, "plain": 1e-4}[method]
    return record(method, lag, accuracies, seed=seed, learning_rate=rate)


def both_rates(method, lag, low, high):
    return [
        record(method, lag, [low], seed=1, learning_rate=1e-4),
        record(method, lag, [high], seed=1, learning_rate=1e-3),
    ]


def headline_of(*records):
    return headline(study(), summarize(study(), [*TUNING, *records]))


def test_the_target_comes_from_the_tuning_seeds_at_lag_0_alone():
    lucky = record("vcpo", 0, [1.0], seed=1)
    assert summarize(study(), [*TUNING, lucky]).target == pytest.approx(0.76)


def test_claims_are_made_at_the_synchronous_rates_on_the_seeds_and_lags_of_the_claims():
    at_another_rate = record("vcpo", 32, seed=3, learning_rate=1e-4)
    beside = [claimed("vcpo", 128, [0.8]), claimed("vcpo", 32, [0.8], seed=4), at_another_rate]
    rows = summarize(study(), [*TUNING, claimed("vcpo", 32, [0.8]), *beside]).claims
    assert [(row.method, row.lag, row.learning_rate, row.num_seeds) for row in rows] == [
        ("vcpo", 32, 1e-3, 1)
    ]


def test_a_study_without_claims_makes_them_on_the_seeds_and_lags_of_its_plane():
    line = next(line for line in STUDY.splitlines() if "claims" in line)
    plain = study_document(STUDY.replace(line, "")).spec
    plane = [claimed("vcpo", 128, [0.8], seed=2), claimed("vcpo", 32, [0.8], seed=3)]
    rows = summarize(plain, [*TUNING, *plane]).claims
    found = [(row.method, row.lag, row.num_seeds) for row in rows]
    assert found == [("vcpo", 0, 1), ("plain", 0, 1), ("vcpo", 128, 1)]


def test_a_method_that_the_claims_leave_out_has_the_seeds_that_it_shares_with_the_plane():
    given = "claims: {lags: [0, 32], seeds: [1, 2, 3]}"
    fewer = given.replace("}", ", methods: [vcpo]}")
    spec = study_document(STUDY.replace(given, fewer)).spec
    rows = summarize(spec, [*TUNING, claimed("plain", 32, [0.8], seed=1)]).claims
    assert [(row.method, row.lag, row.num_seeds) for row in rows] == [("plain", 32, 1)]


def test_the_plane_has_its_own_seeds_only_and_at_lag_0_those_of_the_tuning():
    stale = [claimed("vcpo", 32, [0.8], seed=2), claimed("vcpo", 32, [0.8], seed=3)]
    points = summarize(study(), [*TUNING, claimed("vcpo", 0, [0.1], seed=2), *stale]).plane
    of_vcpo = [each for each in points if each.method == "vcpo"]
    found = [(each.lag, each.learning_rate, each.final_accuracy_mean) for each in of_vcpo]
    assert found == [(0, 1e-4, 0.8), (0, 1e-3, 0.8), (32, 1e-3, 0.8)]
    assert {each.num_seeds for each in points} == {1}


def test_more_seeds_count_at_their_lags_and_for_their_methods_only():
    given = "lags: [32], methods: [vcpo], seeds: [7]"
    records = [
        claimed(method, lag, [0.8], seed=7) for method in ("vcpo", "plain") for lag in (32, 128)
    ]
    plane = summarize(study_document(with_more_seeds("plane", given)).spec, [*TUNING, *records])
    assert [(each.method, each.lag) for each in plane.plane if each.lag] == [("vcpo", 32)]
    claims = summarize(study_document(with_more_seeds("claims", given)).spec, [*TUNING, *records])
    assert [(each.method, each.lag) for each in claims.claims] == [("vcpo", 32)]


def test_the_order_of_the_records_changes_nothing():
    records = [*TUNING, claimed("vcpo", 32, [0.8]), *both_rates("plain", 32, 0.8, 0.1)]
    assert summarize(study(), records) == summarize(study(), records[::-1])


def test_without_tuning_there_is_a_plane_and_nothing_that_needs_the_target():
    found = summarize(study(), both_rates("vcpo", 32, 0.8, 0.1))
    assert (found.target, len(found.plane)) == (None, 2)
    assert (found.tuned, found.safe, found.claims) == ((), (), ())


@pytest.mark.parametrize(
    ("algorithm", "controlled"),
    [
        ("{}", True),
        ("{learningRateRule: none}", True),
        ("{baseline: groupMean}", True),
        ("{baseline: opob, learningRateRule: none}", True),
        ("{baseline: rloo, learningRateRule: none}", False),
        ("{method: grpo}", False),
        ("{method: m2po}", False),
        ("{method: m2po, learningRateRule: sqrt}", True),
    ],
)
def test_our_parts_are_baselines_weighed_by_norms_and_rates_scaled_by_the_ess(
    algorithm, controlled
):
    given = "{baseline: groupMean, learningRateRule: none}"
    spec = study_document(STUDY.replace(given, algorithm)).spec
    assert has_variance_control(spec, spec.method("plain")) is controlled


def test_the_headline_compares_the_subject_with_the_others_at_lag_32():
    claims = [claimed("vcpo", 32, [0.2, 0.9]), claimed("plain", 32, [0.2, 0.3])]
    planes = [*both_rates("vcpo", 32, 0.8, 0.8), *both_rates("plain", 32, 0.8, 0.72)]
    found = headline_of(*claims, *planes)
    # Each claim has its own seed and the one that it shares with the plane.
    assert (found.collapse.count, found.collapse.trials) == (0, 2)
    assert found.most_collapsed_other == "plain"
    assert (found.most_other_collapse.count, found.most_other_collapse.trials) == (1, 2)
    # vcpo is safe at both rates; plain from 0.8 at 1e-4 half of the way to 0.72 at 1e-3.
    assert found.safe_decades == pytest.approx(1.0)
    assert found.widest_other == "plain"
    assert found.best_other_safe_decades == pytest.approx(0.5)


def test_the_steps_at_lag_32_are_a_multiple_of_those_at_lag_0():
    # To 0.76: 9.5 tenths of the way from 0 to 0.8, at step 9.5 and, a step later, at 19.5.
    found = headline_of(claimed("vcpo", 0, [0, 0.8]), claimed("vcpo", 32, [0, 0, 0.8]))
    assert found.steps_ratio.ratio == pytest.approx(19.5 / 9.5)


@pytest.mark.parametrize("stale", [[0.2, 0.5], [0.8, 0.8]], ids=["never", "at once"])
def test_a_ratio_of_steps_needs_steps(stale):
    found = headline_of(claimed("vcpo", 32, stale), claimed("vcpo", 0, [0.8, 0.8]))
    assert found.steps_ratio is None


def test_a_study_without_lag_32_is_judged_at_its_largest_lag():
    text = STUDY.replace("lags: [0, 32, 128]", "lags: [0, 128]")
    spec = study_document(text.replace("lags: [0, 32]", "lags: [0, 8, 128]")).spec
    records = [*TUNING, claimed("vcpo", 8, [0.2, 0.9]), claimed("vcpo", 128, [0.2, 0.3])]
    found = headline(spec, summarize(spec, records))
    assert (found.lag, found.collapse.count, found.collapse.trials) == (128, 1, 1)
    assert headline_lag(study()) == 32


def test_the_headline_of_cells_that_were_not_run_is_empty():
    found = headline_of(claimed("vcpo", 0, [0.8]))
    assert (found.collapse, found.safe_decades, found.widest_other) == (None, None, None)


def test_development_seeds_are_shown_and_count_for_no_claim():
    text = STUDY.replace("  tuning:", "  developmentSeeds: [1]\n  tuning:")
    lucky = [*both_rates("vcpo", 32, 1.0, 1.0), claimed("plain", 32, [0.1], seed=1)]
    other = [
        record("vcpo", 32, [0.3], seed=2, learning_rate=1e-4),
        claimed("vcpo", 32, [0.8], seed=2),
        claimed("plain", 32, [0.7], seed=2),
    ]
    found = summarize(study_document(text).spec, [*TUNING, *lucky, *other])
    (point, _) = (each for each in found.plane if (each.method, each.lag) == ("vcpo", 32))
    assert (point.num_seeds, point.final_accuracy_mean) == (2, pytest.approx(0.65))
    # From 0.3 up to 0.8 it is at 0.76 for the last 0.04 / 0.5 of the decade.
    assert found.safe_decades("vcpo", 32) == pytest.approx(0.08)
    (gap,) = (each for each in found.gaps if each.lag == 32)
    assert (gap.num_pairs, gap.accuracy) == (1, pytest.approx(0.1))
