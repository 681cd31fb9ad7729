"""Hostile and broken callers of the learner: each is refused, and what it sent changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
import struct
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from tests.chaos.fault import Injected, NotInjectedError
from tests.chaos.kinds import Kind
from tests.chaos.live_run import LiveRun, holds, last_lines
from tests.chaos.recorder import read_message
from vcpo.wire.access.roles import AUTHORIZATION, CallerRole, new_key
from vcpo.wire.v1 import control_pb2, policy_pb2, work_pb2

Inject = Callable[[LiveRun, random.Random], Awaitable[Injected]]

_CALL_S = 40.0
_LEASE_WAIT_S = 5.0
_LEASE_TRIES = 20
_SERVES_S = 300.0
LEASE: Final = "/vcpo.wire.v1.WorkService/Lease"
_SUBMIT: Final = "/vcpo.wire.v1.WorkService/Submit"
_RELEASE: Final = "/vcpo.wire.v1.WorkService/Release"
_MANIFEST: Final = "/vcpo.wire.v1.PolicyService/GetManifest"
_THROTTLE: Final = "/vcpo.wire.v1.ControlService/SetThrottle"
_EXPIRED: Final = r"vcpo_trajectories_dropped_total\{[^}]*lease_expired[^}]*\}"
_OVERSIZE_BYTES: Final = 40 << 20
_VOCABULARY: Final = 1 << 20
_FAR_VERSION: Final = 1 << 40


@dataclass(slots=True, kw_only=True)
class Caller:
    """Somebody who calls the learner, past the proxy, with any key and any bytes."""

    channel: grpc.aio.Channel
    key: str
    name: str

    async def call(self, path: str, request: Any) -> bytes:
        """Call a method; a message or bytes."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        call = self.channel.unary_unary(path)
        shown = ((AUTHORIZATION, f"Bearer {self.key}"),)
        return await call(data, timeout=_CALL_S, metadata=shown)

    async def refusal(self, path: str, request: Any) -> grpc.StatusCode:
        """The status of a call; OK if it was answered."""
        try:
            await self.call(path, request)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise NotInjectedError(f"the learner does not answer: {error.details()}") from error
            return error.code()
        return grpc.StatusCode.OK

    async def manifest(self, request: policy_pb2.GetManifestRequest) -> policy_pb2.PolicyManifest:
        """What the learner says of its newest version."""
        return policy_pb2.PolicyManifest.FromString(await self.call(_MANIFEST, request))

    async def lease(self) -> work_pb2.Lease:
        """One lease, as an honest worker asks for it.

        Raises:
            NotInjectedError: if the learner grants none.
        """
        for _ in range(_LEASE_TRIES):
            try:
                held = await self.manifest(policy_pb2.GetManifestRequest(worker_id=self.name))
                request = work_pb2.LeaseRequest(
                    worker_id=self.name,
                    process_id=self.name,
                    rollout_group="main",
                    incarnation=held.incarnation,
                    held_policy_version=held.policy_version,
                    max_trajectories=4,
                    wait_seconds=_LEASE_WAIT_S,
                )
                granted = work_pb2.LeaseResponse.FromString(await self.call(LEASE, request))
            except grpc.aio.AioRpcError as error:
                raise NotInjectedError(f"no lease: {error.details()}") from error
            if granted.leases:  # the learner answers at once when it has a newer version
                return granted.leases[0]
        raise NotInjectedError("the learner has no work to grant")


@contextlib.asynccontextmanager
async def caller_of(run: LiveRun, role: CallerRole | None, name: str) -> AsyncIterator[Caller]:
    """A caller with the key of a role; None: with a key that the run does not know."""
    await _served(run)
    trust = grpc.ssl_channel_credentials((run.certificates.folder / "ca.crt").read_bytes())
    unbounded = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"localhost:{run.port}", trust, unbounded) as channel:
        key = new_key() if role is None else run.keys[role]
        yield Caller(channel=channel, key=key, name=name)


async def use_wrong_key(run: LiveRun, draw: random.Random) -> Injected:
    """A stranger asks for work."""
    before = await _refused(run)
    async with caller_of(run, None, new_name("stranger", draw)) as caller:
        code = await caller.refusal(LEASE, work_pb2.LeaseRequest(worker_id=caller.name))
    return await _told(run, before, "a stranger's lease", code, grpc.StatusCode.UNAUTHENTICATED)


async def use_other_role(run: LiveRun, draw: random.Random) -> Injected:
    """A worker throttles the run."""
    before = await _refused(run)
    async with caller_of(run, CallerRole.WORKER, new_name("intruder", draw)) as caller:
        request = control_pb2.SetThrottleRequest(lag_limit_steps=0, reason="chaos")
        code = await caller.refusal(_THROTTLE, request)
    return await _told(run, before, "a worker's throttle", code, grpc.StatusCode.PERMISSION_DENIED)


async def replay(run: LiveRun, draw: random.Random) -> Injected:
    """A submission that was confirmed is sent again, by somebody else."""
    said = [line for each in run.living_workers for line in last_lines(each.witness)]
    confirmed = {each for line in said if line["what"] == "confirmed" for each in line["ids"]}
    sent = [line for line in said if line["what"] == "submitted" and line["id"] in confirmed]
    if not sent:
        raise NotInjectedError("nothing was confirmed yet")
    chosen = read_message(draw.choice(sent)["message"])
    lease_id = chosen.trajectory_id.rpartition("/")[0]
    async with caller_of(run, CallerRole.WORKER, new_name("echo", draw)) as caller:
        request = work_pb2.SubmitRequest(
            worker_id=caller.name, lease_id=lease_id, trajectories=[chosen]
        )
        answer = work_pb2.SubmitResponse.FromString(await caller.call(_SUBMIT, request))
        told = work_pb2.SubmitOutcome.Name(answer.outcomes[0])
    return Injected(
        what=f"{chosen.trajectory_id} sent again",
        sign="DUPLICATE or LEASE_ENDED",
        is_shown=told.endswith(("DUPLICATE", "LEASE_ENDED")),
    )


def submit_wrong(what: str, change: Callable[[work_pb2.Trajectory], None]) -> Inject:
    """A worker with a lease of its own submits a response that no update can use."""

    async def inject(run: LiveRun, draw: random.Random) -> Injected:
        name = new_name("broken", draw)
        async with caller_of(run, CallerRole.WORKER, name) as caller:
            lease = await caller.lease()
            request = _submission(name, lease)
            change(request.trajectories[0])
            code = await caller.refusal(_SUBMIT, request)
            await caller.call(_RELEASE, work_pb2.ReleaseRequest(worker_id=name))
        return _answered(what, code, grpc.StatusCode.INVALID_ARGUMENT)

    return inject


def _label_with_the_future(trajectory: work_pb2.Trajectory) -> None:
    trajectory.version_spans[0].policy_version = _FAR_VERSION


def _use_unknown_tokens(trajectory: work_pb2.Trajectory) -> None:
    trajectory.response_token_ids = struct.pack("<I", _VOCABULARY)


def _reward_without_a_number(trajectory: work_pb2.Trajectory) -> None:
    trajectory.reward = math.nan


async def abandon_lease(run: LiveRun, draw: random.Random) -> Injected:
    """A worker takes a lease and is not heard of again; the learner grants its prompt again."""
    name = new_name("absent", draw)
    before = await _metric(run, _EXPIRED)
    async with caller_of(run, CallerRole.WORKER, name) as caller:
        lease = await caller.lease()
    learner = run.learner
    shown = False
    for _ in range(60):
        await asyncio.sleep(0.5)
        if run.learner is not learner:  # it ended, and with it all leases
            return Injected(what=f"{lease.lease_id} abandoned; the learner restarted")
        if shown := await _metric(run, _EXPIRED) > before:
            break
    return Injected(
        what=f"{lease.lease_id} abandoned", sign="a drop of lease_expired", is_shown=shown
    )


async def send_garbage_bytes(run: LiveRun, draw: random.Random) -> Injected:
    """Bytes of no protocol arrive at the learner's port, and are not answered."""
    await _served(run)
    return await _shout(run, draw.randbytes(draw.randint(1, 100_000)), "garbage bytes")


async def speak_plain_text(run: LiveRun, draw: random.Random) -> Injected:
    """A caller speaks HTTP/2 without TLS."""
    await _served(run)
    return await _shout(run, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), "plain text")


async def _shout(run: LiveRun, data: bytes, what: str) -> Injected:
    """Send bytes, and wait until the learner ends the connection."""
    answer = b""
    try:
        async with asyncio.timeout(_CALL_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
            with contextlib.suppress(OSError):
                writer.write(data)
                await writer.drain()
                answer = await reader.read()
            writer.close()
    except TimeoutError:
        return Injected(what=what, sign="the connection is ended", is_shown=False)
    except OSError as error:
        raise NotInjectedError(f"no connection: {error}") from error
    shown = b"vcpo" not in answer
    return Injected(what=what, sign="the connection is ended", is_shown=shown)


async def send_garbage_message(run: LiveRun, draw: random.Random) -> Injected:
    """A worker's message is no message."""
    before = await _refused(run)
    async with caller_of(run, CallerRole.WORKER, new_name("garbler", draw)) as caller:
        code = await caller.refusal(_SUBMIT, b"\xff" + draw.randbytes(draw.randint(1, 5_000)))
    return await _told(run, before, "a garbage message", code, grpc.StatusCode.INVALID_ARGUMENT)


async def send_oversize(run: LiveRun, draw: random.Random) -> Injected:
    """A message is larger than any may be."""
    async with caller_of(run, CallerRole.WORKER, new_name("giant", draw)) as caller:
        code = await caller.refusal(_SUBMIT, bytes(_OVERSIZE_BYTES))
    return _answered("a message of 40 MiB", code, grpc.StatusCode.RESOURCE_EXHAUSTED)


def new_name(word: str, draw: random.Random) -> str:
    """A worker's name that is bound to nobody's key."""
    return f"{word}-{draw.getrandbits(32):08x}"


def _submission(name: str, lease: work_pb2.Lease) -> work_pb2.SubmitRequest:
    """A submission of one token that is right in form."""
    return work_pb2.SubmitRequest(
        worker_id=name,
        lease_id=lease.lease_id,
        trajectories=[
            work_pb2.Trajectory(
                trajectory_id=f"{lease.lease_id}/0",
                prompt_token_ids=struct.pack("<I", 3),
                response_token_ids=struct.pack("<I", 4),
                rollout_logprobs=struct.pack("<f", -1.0),
                version_spans=[
                    work_pb2.VersionSpan(policy_version=lease.granted_policy_version, num_tokens=1)
                ],
                reward=1.0,
                finish_reason=work_pb2.FINISH_REASON_STOP,
            )
        ],
    )


def _answered(what: str, code: grpc.StatusCode, due: grpc.StatusCode) -> Injected:
    sign = f"refused with {due.name}"
    return Injected(what=f"{what}: {code.name}", sign=sign, is_shown=code is due)


async def _told(
    run: LiveRun, before: float, what: str, code: grpc.StatusCode, due: grpc.StatusCode
) -> Injected:
    """A call that was refused, and that the learner's metric counts."""
    learner, counted = run.learner, False
    for _ in range(20):
        counted = await _refused(run) > before
        if counted or run.learner is not learner:
            break
        await asyncio.sleep(0.5)
    sign = f"refused with {due.name}, and counted in vcpo_learner_calls_refused_total"
    is_shown = code is due and (counted or run.learner is not learner)
    return Injected(what=f"{what}: {code.name}", sign=sign, is_shown=is_shown)


async def _served(run: LiveRun) -> None:
    """Wait until the learner serves.

    Raises:
        NotInjectedError: if it does not in time.
    """
    serves = await holds(
        lambda: bool(run.lives) and run.learner.is_alive and run.learner.ready is not None,
        _SERVES_S,
    )
    if not serves:
        raise NotInjectedError("no learner serves")


async def _refused(run: LiveRun) -> float:
    """Calls that the learner has refused, as its metric counts them."""
    return await _metric(run, r"vcpo_learner_calls_refused_total\{[^}]*\}")


async def _metric(run: LiveRun, series: str) -> float:
    """Sum over the series of the learner's metrics whose name and labels match."""
    await _served(run)
    ready = run.learner.ready
    assert ready is not None
    url = f"http://127.0.0.1:{ready.metrics_port}/metrics"
    try:
        text = await asyncio.to_thread(_read, url)
    except OSError as error:
        raise NotInjectedError(f"no metrics: {error}") from error
    found = re.findall(rf"^{series} (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in found)


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_CALL_S) as response:
        return response.read().decode()


INJECTORS: Final[Mapping[Kind, Inject]] = {
    Kind.STRANGER: use_wrong_key,
    Kind.OTHER_ROLE: use_other_role,
    Kind.REPLAYED: replay,
    Kind.FUTURE_LABEL: submit_wrong("a label of the future", _label_with_the_future),
    Kind.FOREIGN_TOKENS: submit_wrong("a token without a row", _use_unknown_tokens),
    Kind.NOT_A_NUMBER: submit_wrong("a reward that is no number", _reward_without_a_number),
    Kind.ABANDONED: abandon_lease,
    Kind.GARBAGE_BYTES: send_garbage_bytes,
    Kind.GARBAGE_MESSAGE: send_garbage_message,
    Kind.OVERSIZE: send_oversize,
    Kind.PLAIN_TEXT: speak_plain_text,
}
