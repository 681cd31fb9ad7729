"""Custom resources: schemas, defaults, pruning and CEL, on the fake and on a real server."""

import copy
from typing import Any

import pytest

from tests.fixtures.kubernetes.client import Answer, Client
from tests.fixtures.kubernetes.objects import WIDGET_DEFINITION, widget

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def _fields(answer: Answer) -> list[str]:
    return [cause["field"] for cause in answer.body["details"]["causes"]]


async def test_absent_fields_get_their_defaults_at_every_level(api: Client, widgets: str) -> None:
    spec = (await api.post(widgets, widget("a"))).body["spec"]
    assert spec == {"model": "m", "workers": 1, "mode": "fast", "limits": {"steps": 10}}


async def test_unknown_fields_are_pruned(api: Client, widgets: str) -> None:
    created = await api.post(widgets, widget("a", bogus=1, limits={"other": 2}))
    assert "bogus" not in created.body["spec"]
    assert created.body["spec"]["limits"] == {"steps": 10}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"workers": 0}, id="below the minimum"),
        pytest.param({"workers": "3"}, id="of another type"),
        pytest.param({"mode": "sideways"}, id="outside the enumeration"),
        pytest.param({"groups": [{"name": "x"}, {"name": "x"}]}, id="the same key twice"),
    ],
)
async def test_a_value_is_refused(api: Client, widgets: str, spec: dict[str, Any]) -> None:
    refused = await api.post(widgets, widget("a", **spec))
    assert (refused.code, refused.body["reason"]) == (422, "Invalid")


async def test_a_cel_rule_refuses_with_its_message(api: Client, widgets: str) -> None:
    refused = await api.post(widgets, widget("a", workers=9))
    assert refused.code == 422
    assert "at most 8 workers" in refused.body["message"]


async def test_a_transition_rule_compares_with_what_was(api: Client, widgets: str) -> None:
    await api.post(widgets, widget("a"))
    refused = await api.patch(f"{widgets}/a", {"spec": {"model": "other"}})
    assert refused.code == 422
    assert "`model` is immutable" in refused.body["message"]


async def test_a_default_that_breaks_a_rule_of_its_own_is_refused(api: Client) -> None:
    definition = copy.deepcopy(WIDGET_DEFINITION)
    definition["metadata"]["name"] = "gadgets.contract.test"
    definition["spec"]["names"] = {"plural": "gadgets", "kind": "Gadget", "listKind": "GadgetList"}
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    rule = {"rule": "self.least <= 3", "message": "`least` must be at most 3"}
    least = {"type": "integer", "default": 1}
    spec["properties"]["bounds"] = {
        "type": "object",
        "default": {},
        "properties": {"least": least},
        "x-kubernetes-validations": [rule],
    }
    refused = await api.post(DEFINITIONS, definition)
    assert refused.code == 422
    assert _fields(refused)[0].endswith("[bounds].default")
