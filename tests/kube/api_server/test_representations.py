from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.kubernetes.requests.representations import Form, form_of, human_duration, json_path

BODY = {
    "metadata": {"labels": {"app.kubernetes.io/name": "vcpo"}},
    "status": {
        "conditions": [{"type": "Other", "status": "False"}, {"type": "Ready", "status": "True"}]
    },
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ('.status.conditions[?(@.type=="Ready")].status', "True"),
        (".status.conditions[?(@.type=='Absent')].status", None),
        (".status.conditions[0].type", "Other"),
        (".status.conditions[9].type", None),
        (r".metadata.labels.app\.kubernetes\.io/name", "vcpo"),
        (".metadata.labels['app.kubernetes.io/name']", "vcpo"),
        (".spec.absent.deeper", None),
    ],
)
def test_a_printer_column_finds_its_value(path: str, value: Any) -> None:
    assert json_path(BODY, path) == value


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (10_799, "179m"), (10_800, "3h"), (172_800, "2d")],
)
def test_an_age_is_shown_in_the_largest_unit(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("application/json", Form.FULL),
        ("application/json;as=Table;v=v1;g=meta.k8s.io,application/json", Form.TABLE),
        ("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1", Form.METADATA),
    ],
)
def test_the_form_follows_the_accept_header(accept: str, form: Form) -> None:
    assert form_of(accept) is form
