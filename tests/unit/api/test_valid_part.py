"""Of a run file with problems the valid fields can still be checked against the machine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.api import parse_run
from vcpo.api.valid_part import valid_part

GOOD = {
    "metadata": {"name": "r"},
    "spec": {
        "model": {"name": "models/tiny"},
        "environment": {"name": "task:Echo", "parameters": {"word": "ho"}},
        "steps": 3,
    },
}


def with_changes(changes):
    """The good document with values at paths; None removes what is there."""
    document = {"metadata": dict(GOOD["metadata"]), "spec": dict(GOOD["spec"])}
    for path, value in changes.items():
        *above, name = path.split(".")
        place = document
        for part in above:
            place[part] = dict(place.get(part, {}))
            place = place[part]
        if value is None:
            del place[name]
        else:
            place[name] = value
    return document


def test_a_valid_run_is_whole():
    assert valid_part(GOOD) == parse_run(
        "{metadata: {name: r}, spec: {model: {name: models/tiny}, steps: 3,"
        " environment: {name: 'task:Echo', parameters: {word: ho}}}}"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.steps": 0},
        {"spec.steps": None},
        {"spec.steps": "3"},
        {"spec.algorithm": {"lag": 12}},
        {"spec.algorithm": 7},
        {"spec.model.lora": {"rank": 0}},
        {"spec.nothing": {"a": [1]}},
        {"nothing": 1},
        {"metadata": None},
        {"metadata.name": "Not A Name"},
        {"spec.batch": {"trajectoriesPerPrompt": 1}},
        {"spec.rollouts": [{"name": "a"}, {"name": "a", "minReplicas": -1}]},
        {"spec.rollouts": [{"name": "a", "minReplicas": 3, "maxReplicas": 2}]},
        {"spec.steps": 0, "spec.algorithm": {"lag": 12}, "spec.learner": {"processes": "two"}},
    ],
    ids=str,
)
def test_what_is_invalid_hides_neither_model_nor_environment(changes):
    found = valid_part(with_changes(changes))
    assert found is not None
    assert found.spec.model.name == "models/tiny"
    assert found.spec.environment.name == "task:Echo"
    assert found.spec.environment.parameters == {"word": "ho"}


@pytest.mark.parametrize("model", [None, 7, {}, {"name": 7}, {"name": ""}], ids=str)
def test_without_a_model_the_environment_is_still_there(model):
    found = valid_part(with_changes({"spec.model": model}))
    assert found is not None
    assert found.spec.environment.name == "task:Echo"


def test_its_document_stays_as_it_was():
    document = with_changes({"spec.steps": 0})
    valid_part(document)
    assert document["spec"]["steps"] == 0


@pytest.mark.parametrize(
    "document", [{}, {"spec": 3}, {"spec": None}, {"metadata": [], "spec": {}}]
)
def test_a_document_with_nothing_in_it_raises_nothing(document):
    valid_part(document)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=6), below),
    max_leaves=8,
)


@settings(max_examples=25)
@given(
    spec=st.dictionaries(
        st.sampled_from(["model", "environment", "steps", "batch", "rollouts", "learner", "x"]),
        _JSON,
    )
)
def test_whatever_a_file_has_the_valid_part_is_a_run_or_nothing(spec):
    found = valid_part({"metadata": {"name": "r"}, "spec": spec})
    assert found is None or found.metadata.name == "r"
