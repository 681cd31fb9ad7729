from __future__ import annotations

from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.objects import config_map

PATH = "/api/v1/namespaces/default/configmaps"


async def test_a_watch_from_before_the_compaction_is_expired(
    fake: FakeApiServer, client: Client
) -> None:
    created = await client.post(PATH, config_map("a"))
    await client.post(PATH, config_map("b"))
    fake.compact()
    kind, status = await anext(client.watch(PATH, resourceVersion=created.version))
    assert (kind, status["code"], status["reason"]) == ("ERROR", 410, "Expired")


async def test_a_page_from_before_the_compaction_is_expired(
    fake: FakeApiServer, client: Client
) -> None:
    for name in ("a", "b"):
        await client.post(PATH, config_map(name))
    first = await client.get(PATH, limit="1")
    await client.post(PATH, config_map("c"))
    fake.compact()
    assert (await client.get(PATH, **{"continue": first.metadata["continue"]})).code == 410


async def test_a_version_that_is_no_number_is_refused(client: Client) -> None:
    assert (await client.get(PATH, watch="true", resourceVersion="bogus")).code == 400


async def test_closing_all_watches_ends_their_streams(fake: FakeApiServer, client: Client) -> None:
    await client.post(PATH, config_map("a"))
    seen = []
    async for kind, _ in client.watch(PATH):
        seen.append(kind)
        fake.watches.close_all()
    assert seen == ["ADDED"]
    assert len(fake.watches) == 0


async def test_a_deaf_watch_stays_open_and_misses_what_happens(
    fake: FakeApiServer, client: Client
) -> None:
    await client.post(PATH, config_map("a"))
    seen = []
    async for _, body in client.watch(PATH):
        seen.append(body["metadata"]["name"])
        if seen == ["a"]:
            fake.watches.deaf = True
            await client.post(PATH, config_map("missed"))
            await fake.wait_until_settled()
            fake.watches.deaf = False
            await client.post(PATH, config_map("heard"))
        else:
            break
    assert seen == ["a", "heard"]


async def test_an_idle_watch_hears_bookmarks(fake: FakeApiServer, client: Client) -> None:
    fake.watches.bookmark_period_s = 0.01
    version = (await client.post(PATH, config_map("a"))).version
    watch = client.watch(PATH, resourceVersion=version, allowWatchBookmarks="true")
    kind, body = await anext(watch)
    assert (kind, body["metadata"]) == ("BOOKMARK", {"resourceVersion": version})
