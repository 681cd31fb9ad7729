"""The numbers that tracking services get."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fixtures.records import STEP
from vcpo.tracking.scalars import LAST_NAME, step_scalars

WEIGHED = dataclasses.replace(
    STEP,
    ess_ratio=0.4,
    on_policy_ess_ratio=0.8,
    learning_rate_scale=0.5,
    diagnostics={"token_ess_ratio": 0.75},
    mismatch={"gap_nats": 0.01, "cause": "it is late", "by_engine": {"hf": 0.02}},
)


def test_every_number_of_a_step_is_sent_under_the_name_of_its_field():
    numbers = {
        each.name
        for each in dataclasses.fields(WEIGHED)
        if isinstance(getattr(WEIGHED, each.name), int | float) and each.name != "time_unix_s"
    }
    sent = step_scalars(WEIGHED)
    assert numbers <= {name.partition("/")[2] for name in sent}
    assert {name.partition("/")[0] for name in sent} == {"task", "learner", "off_policy", "rollout"}
    assert list(sent)[-1] == LAST_NAME


def test_numbers_within_a_field_are_sent_and_words_are_not():
    sent = step_scalars(dataclasses.replace(WEIGHED, dropped={"stale": 3}))
    assert sent["off_policy/mismatch/by_engine/hf"] == 0.02
    assert sent["off_policy/diagnostics/token_ess_ratio"] == 0.75
    assert sent["rollout/dropped/stale"] == 3
    assert "off_policy/mismatch/cause" not in sent


def test_the_ess_is_sent_also_relative_to_that_of_on_policy_data():
    sent = step_scalars(WEIGHED)
    assert sent["off_policy/relative_ess_ratio"] == pytest.approx(0.5)
    assert sent["off_policy/ess_ratio"] == 0.4


def test_a_skipped_step_has_no_learning_rate_and_one_without_weights_no_ess():
    skipped = step_scalars(dataclasses.replace(WEIGHED, skipped="no_gradient"))
    assert "off_policy/learning_rate_scale" not in skipped
    assert skipped[LAST_NAME] == 1.0
    weightless = step_scalars(dataclasses.replace(WEIGHED, ess_ratio=0.0))
    assert {"off_policy/ess_ratio", "off_policy/relative_ess_ratio"}.isdisjoint(weightless)
