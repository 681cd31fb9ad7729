"""Lists and watches, on the fake and on a real server."""

import pytest

from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.objects import widget


async def _events(api: Client, path: str, count: int, **query: str) -> list[tuple[str, str]]:
    """The first events of a watch: kind and name."""
    found = []
    async for kind, body in api.watch(path, **query):
        found.append((kind, body["metadata"].get("name", "")))
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("t=a", ["p"]),
        ("t==a", ["p"]),
        ("u", ["q"]),
        ("t=b,u", ["q"]),
    ],
)
async def test_a_label_selector_chooses(
    api: Client, widgets: str, selector: str, names: list[str]
) -> None:
    for name, labels in (("p", {"t": "a"}), ("q", {"t": "b", "u": "1"}), ("r", {})):
        await api.post(widgets, widget(name, metadata={"labels": labels}))
    assert (await api.get(widgets, labelSelector=selector)).names == names


async def test_a_watch_replays_the_history_since_a_version(api: Client, widgets: str) -> None:
    created = await api.post(widgets, widget("a"))
    await api.patch(f"{widgets}/a", {"spec": {"workers": 2}})
    await api.post(widgets, widget("b"))
    await api.delete(f"{widgets}/b")
    assert await _events(api, widgets, 3, resourceVersion=created.version) == [
        ("MODIFIED", "a"),
        ("ADDED", "b"),
        ("DELETED", "b"),
    ]


async def test_an_object_that_leaves_the_selection_looks_deleted(api: Client, widgets: str) -> None:
    created = await api.post(widgets, widget("a"))
    for value in ("1", "2", None):
        await api.patch(f"{widgets}/a", {"metadata": {"labels": {"x": value}}})
    seen = await _events(api, widgets, 3, resourceVersion=created.version, labelSelector="x")
    assert seen == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]


async def test_a_watch_of_one_namespace_sees_no_other(api: Client, widgets: str) -> None:
    version = (await api.get(widgets)).version
    elsewhere = "/apis/contract.test/v1/namespaces/default/widgets"
    await api.post(elsewhere, widget("far"))
    await api.delete(f"{elsewhere}/far")
    await api.post(widgets, widget("near"))
    assert await _events(api, widgets, 1, resourceVersion=version) == [("ADDED", "near")]


async def test_a_watch_ends_when_its_time_is_over(api: Client, widgets: str) -> None:
    await api.post(widgets, widget("a"))
    assert await _events(api, widgets, 99, timeoutSeconds="1") == [("ADDED", "a")]


async def test_a_bookmark_marks_the_end_of_the_initial_events(api: Client, widgets: str) -> None:
    await api.post(widgets, widget("a"))
    query = {
        "sendInitialEvents": "true",
        "allowWatchBookmarks": "true",
        "resourceVersionMatch": "NotOlderThan",
    }
    assert await _events(api, widgets, 2, **query) == [("ADDED", "a"), ("BOOKMARK", "")]
