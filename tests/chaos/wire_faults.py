"""Faults on the wire: of the network, of certificates, and of the weights that travel on it."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from tests.chaos.fault import Injected, NotInjectedError
from tests.chaos.kinds import Kind
from tests.chaos.live_run import SIGN_S, LiveRun, holds
from tests.chaos.proxy import Direction, Disturbance
from tests.chaos.witness import FLIP_WEIGHTS

_TOUCHED_S = 60.0
"""Time in which some bytes must pass that a disturbance can touch."""
_CUTS = 8
"""Times that connections end before nobody is taken to notice."""
_CALL_FAILED: Final = r"failed with [A-Z_]+: "
"""Line of a worker when its calls begin to fail."""
_ENDED_CALL: Final = rf"{_CALL_FAILED}|succeeded after \d+ failed calls"

Inject = Callable[[LiveRun, random.Random], Awaitable[Injected]]


async def _disturb(run: LiveRun, disturbance: Disturbance, duration_s: float) -> None:
    """Disturb what passes for a time, and until some bytes were touched.

    Raises:
        NotInjectedError: if none were.
    """
    async with run.proxy.disturbed(disturbance):
        if not await holds(lambda: disturbance.num_touched > 0, _TOUCHED_S):
            raise NotInjectedError("no byte passed")
        await asyncio.sleep(duration_s)


async def delay(run: LiveRun, draw: random.Random) -> Injected:
    """Each chunk comes late."""
    delay_s = draw.uniform(0.1, 0.8)
    await _disturb(run, Disturbance(delay_s=delay_s), draw.uniform(1.0, 3.0))
    return Injected(what=f"chunks delayed by {delay_s:.1f} s")


async def throttle(run: LiveRun, draw: random.Random) -> Injected:
    """Few bytes pass in a second."""
    bytes_per_s = draw.choice([20_000.0, 100_000.0])
    disturbance = Disturbance(direction=draw.choice(list(Direction)), bytes_per_s=bytes_per_s)
    await _disturb(run, disturbance, draw.uniform(1.0, 3.0))
    return Injected(what=f"{bytes_per_s:g} B/s {disturbance.direction}")


async def corrupt(run: LiveRun, draw: random.Random) -> Injected:
    """Some bytes are changed; TLS ends the connection."""
    disturbance = Disturbance(
        direction=draw.choice(list(Direction)), num_flipped=draw.randint(1, 3)
    )
    return await _break_connection(run, disturbance, "bytes changed")


async def swallow(run: LiveRun, draw: random.Random) -> Injected:
    """Some bytes are missing, and later ones pass."""
    disturbance = Disturbance(
        direction=draw.choice(list(Direction)), num_swallowed=draw.randint(1, 50_000)
    )
    return await _break_connection(run, disturbance, "bytes swallowed")


async def tear(run: LiveRun, draw: random.Random) -> Injected:
    """A connection ends in the middle of a message."""
    disturbance = Disturbance(direction=draw.choice(list(Direction)), tears=True)
    return await _break_connection(run, disturbance, "connection torn")


async def _break_connection(run: LiveRun, disturbance: Disturbance, what: str) -> Injected:
    since = run.mark()
    await _disturb(run, disturbance, 0.5)
    return Injected(
        what=f"{what} {disturbance.direction}",
        sign="a worker logs that its calls fail",
        is_shown=await run.told(since, _ENDED_CALL),
    )


async def cut(run: LiveRun, _: random.Random) -> Injected:
    """Every connection ends at once."""
    await _connected(run)
    number, is_shown = await _cut_until_told(run, run.mark(), _ENDED_CALL)
    return Injected(
        what=f"{number} connections cut",
        sign="a worker logs that its calls fail",
        is_shown=is_shown,
    )


async def partition(run: LiveRun, draw: random.Random) -> Injected:
    """No connection lives or begins for a while."""
    await _connected(run)
    since = run.mark()
    run.proxy.refuses, refused = True, run.proxy.num_refused
    try:
        run.proxy.cut()
        if not await holds(lambda: run.proxy.num_refused > refused, _TOUCHED_S):
            raise NotInjectedError("no worker tried to connect")
        await asyncio.sleep(draw.uniform(0.5, 4.0))
    finally:
        run.proxy.refuses = False
    return Injected(
        what="partition",
        sign="a worker logs that its calls fail",
        is_shown=await run.told(since, _ENDED_CALL),
    )


async def hold_one_way(run: LiveRun, draw: random.Random, direction: Direction) -> Injected:
    """Bytes of one direction wait, those of the other pass."""
    await _disturb(run, Disturbance(direction=direction, holds=True), draw.uniform(1.0, 5.0))
    return Injected(what=f"nothing passes {direction}")


async def flip_weights(run: LiveRun, _: random.Random) -> Injected:
    """A bit of a version is another when it has arrived."""
    since, order = run.mark(), run.folder / FLIP_WEIGHTS
    order.touch()
    if not await holds(lambda: not order.exists(), _TOUCHED_S):
        order.unlink(missing_ok=True)
        raise NotInjectedError("no worker has read weights")
    return Injected(
        what="a bit of a version flipped",
        sign="a worker logs that the version is corrupt",
        is_shown=await run.told(since, r"is fetched again"),
    )


async def _connected(run: LiveRun) -> None:
    """Wait until a worker is at work: it misses a connection only if it has calls on it.

    Raises:
        NotInjectedError: if none is in time.
    """
    if not await run.works(_TOUCHED_S) or not run.proxy.num_links:
        raise NotInjectedError("no worker is connected")


async def renew(run: LiveRun, _: random.Random) -> Injected:
    """Certificates are renewed by the same authority; new connections get them."""
    change = run.certificates.renew
    return await _reconnect(run, change, "certificates renewed", r"serving with a new certificate")


async def make_unreadable(run: LiveRun, _: random.Random) -> Injected:
    """A private key is gone for a while: the certificate in use stays."""
    change = run.certificates.make_unreadable
    try:
        return await _reconnect(run, change, "private key removed", r"the certificate in use stays")
    finally:
        run.certificates.restore()


async def expire(run: LiveRun, draw: random.Random) -> Injected:
    """Certificates have ended; workers do not trust them, until there are valid ones."""
    try:
        change = run.certificates.expire
        injected = await _reconnect(run, change, "certificates ended", _CALL_FAILED)
        await asyncio.sleep(draw.uniform(0.0, 3.0))
    finally:
        run.certificates.renew()
    return injected


async def replace_authority(run: LiveRun, _: random.Random) -> Injected:
    """Another authority signs; workers end, and those after them trust it."""
    change = run.certificates.replace_authority
    return await _reconnect(run, change, "authority replaced", r"serving with a new certificate")


async def _reconnect(run: LiveRun, change: Callable[[], None], what: str, sign: str) -> Injected:
    """Change the certificates and end the connections, so that new ones are made with them.

    A server may take a new certificate before its connections end, and says so then.
    """
    await _connected(run)
    since = run.mark()
    change()
    _, is_shown = await _cut_until_told(run, since, sign)
    return Injected(what=what, sign=sign, is_shown=is_shown)


async def _cut_until_told(run: LiveRun, since: Mapping[Path, int], sign: str) -> tuple[int, bool]:
    """End every connection, again if nobody notices: all workers may be between two calls.

    Returns: how many connections ended, and whether a process logged a line that matches.
    """
    number = 0
    for _ in range(_CUTS):
        await run.works(_TOUCHED_S)
        number += run.proxy.cut()
        if await holds(lambda: run.is_told(since, sign), SIGN_S / _CUTS):
            return number, True
    return number, False


INJECTORS: Final[Mapping[Kind, Inject]] = {
    Kind.DELAYED: delay,
    Kind.THROTTLED: throttle,
    Kind.CORRUPTED: corrupt,
    Kind.SWALLOWED: swallow,
    Kind.TORN: tear,
    Kind.CUT: cut,
    Kind.PARTITIONED: partition,
    Kind.LEARNER_DEAF: lambda run, draw: hold_one_way(run, draw, Direction.TO_LEARNER),
    Kind.LEARNER_MUTE: lambda run, draw: hold_one_way(run, draw, Direction.TO_WORKER),
    Kind.WRONG_WEIGHTS: flip_weights,
    Kind.RENEWED: renew,
    Kind.UNREADABLE: make_unreadable,
    Kind.EXPIRED: expire,
    Kind.OTHER_AUTHORITY: replace_authority,
}
