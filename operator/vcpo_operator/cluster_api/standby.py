"""The liveness probe of an operator that waits for the Lease.

kopf answers the probe only while it watches. Until then this server answers on the same address.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from aiohttp import web

_GRACE_S = 1.0
"""How long a probe that is being answered may keep the address in use."""


@contextlib.asynccontextmanager
async def serve_standby_probe(endpoint: str | None) -> AsyncIterator[None]:
    """Answer the liveness probe; on exit the address is free again.

    endpoint: `http://host:port/path`; None serves nothing.
    Raises: OSError when the address is not available.
    """
    if endpoint is None:
        yield
        return

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"state": "waits for the Lease"})

    parts = urlsplit(endpoint)
    application = web.Application()
    application.router.add_get(parts.path, answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=_GRACE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, parts.hostname, parts.port).start()
        yield
    finally:
        await runner.cleanup()
