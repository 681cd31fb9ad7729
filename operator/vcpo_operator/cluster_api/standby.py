"""Standing by: an operator that waits for the Lease is alive, and says so to the kubelet.

kopf answers the liveness probe, but only from the moment it watches; until then this does, on the
same address.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from aiohttp import web

_GRACE_S = 1.0
"""How long a probe that is being answered may hold the address."""


@contextlib.asynccontextmanager
async def serve_standby_probe(endpoint: str | None) -> AsyncIterator[None]:
    """Answer the liveness probe; on leaving, the address is free for who comes next.

    endpoint: `http://host:port/path`; None answers nowhere.
    Raises: OSError when the address cannot be had.
    """
    if endpoint is None:
        yield
        return
    parts = urlsplit(endpoint)
    application = web.Application()
    application.router.add_get(parts.path, _alive)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=_GRACE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, parts.hostname, parts.port).start()
        yield
    finally:
        await runner.cleanup()


async def _alive(request: web.Request) -> web.Response:
    return web.json_response({"state": "waits for the Lease"})
