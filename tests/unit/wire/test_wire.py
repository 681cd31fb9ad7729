"""TLS over real servers and channels: who is trusted, and certificates that change in service."""

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.certificates import write_certificates
from tests.unit.wire.echo_service import SERVICE, TIMEOUT_S, Echo, manifest
from vcpo.wire.access.roles import (
    METHODS_OF,
    RUN_ROLES,
    CallerRole,
    key_variables,
    keys_from_environment,
    new_run_keys,
    role_of,
)
from vcpo.wire.access.tls import NOBODY, CertificateFolder, checked_folder
from vcpo.wire.client import open_channel
from vcpo.wire.errors import InvalidMessageError, check_id, check_wait
from vcpo.wire.failures import (
    Failure,
    FailureCause,
    FailureCounts,
    failure_from_message,
    failure_to_message,
    one_line,
)
from vcpo.wire.limits import CHANNEL_OPTIONS
from vcpo.wire.packing import pack_logprobs, pack_token_ids, unpack_logprobs, unpack_token_ids
from vcpo.wire.phase import RunPhase, phase_from_message, phase_to_message
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import (
    control_pb2,
    control_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    work_pb2,
    work_pb2_grpc,
)


@pytest.mark.parametrize("name", ["", "a" * 257, "\x1b[2J", "a\nb", "\u202e"])
def test_an_id_can_be_printed(name):
    with pytest.raises(
        InvalidMessageError, match=r"^worker_id: must be 1 to 256 printable characters, got '"
    ):
        check_id("worker_id", name)


@pytest.mark.parametrize("wait_s", [-0.1, 30.1, float("nan"), float("inf")])
def test_a_wait_outside_is_named(wait_s):
    with pytest.raises(InvalidMessageError, match=r"^wait_seconds: must be 0 to 30 seconds, got "):
        check_wait("wait_seconds", wait_s)


def test_a_phase_has_its_number_in_both_directions():
    for phase in RunPhase:
        number = getattr(work_pb2, f"RUN_PHASE_{phase.name}")
        assert (phase_to_message(phase), phase_from_message(number)) == (number, phase)


@pytest.mark.parametrize("number", [work_pb2.RUN_PHASE_UNSPECIFIED, 99])
def test_a_phase_not_known_here_counts_as_running(number):
    assert phase_from_message(number) is RunPhase.RUNNING


ROOT = Path(__file__).parents[3]


def test_who_lost_its_server_asks_for_it_again_within_five_seconds():
    options = dict(CHANNEL_OPTIONS)
    backoffs = [f"grpc.{kind}_reconnect_backoff_ms" for kind in ("initial", "min", "max")]
    for option in (*backoffs, "grpc.dns_min_time_between_resolutions_ms"):
        assert 100 <= options[option] <= 5_000


def test_channels_are_opened_where_these_bounds_are_set():
    opened = {
        str(path.relative_to(ROOT))
        for part in ("core", "learner_svc", "rollout_svc", "operator")
        for path in (ROOT / part).rglob("*.py")
        if re.search(r"\b(insecure|secure)_channel\(", path.read_text())
    }
    assert opened == {"core/vcpo/wire/client.py"}


TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20)


@given(TOKEN_IDS)
def test_token_ids_read_as_the_sequence_that_was_packed(token_ids):
    packed = unpack_token_ids("ids", pack_token_ids(token_ids), most=20)
    assert packed == token_ids
    assert tuple(token_ids) == packed
    assert hash(packed) == hash(tuple(token_ids))
    assert [packed[index] for index in range(len(packed))] == token_ids
    assert packed[-1] == token_ids[-1]
    assert packed[1:] == token_ids[1:]
    assert packed[::2] == token_ids[::2]


def test_logprobs_are_the_float32_numbers_of_the_wire():
    packed = unpack_logprobs("logprobs", pack_logprobs([-0.5, -0.0, -1.25]), count=3)
    assert packed == (-0.5, 0.0, -1.25)
    assert packed != (-0.5, 0.0, -1.5)
    assert packed != (-0.5, 0.0)
    assert packed != "abc"


def failure(message="no item 7", *, cause=FailureCause.REWARD, line=12):
    return Failure(
        cause=cause, exception_type="KeyError", message=message, location=f"/app/task.py:{line}"
    )


def test_the_first_and_every_hundredth_of_the_same_are_worth_a_line():
    counts = FailureCounts()
    lines = [counts.add(failure(f"no item {number}")) for number in range(1, 251)]
    assert [(number, line) for number, line in enumerate(lines, start=1) if line] == [
        (1, "reward: KeyError: no item 1 (/app/task.py:12)"),
        (100, "reward: KeyError: no item 100 (/app/task.py:12); 100 times so far"),
        (200, "reward: KeyError: no item 200 (/app/task.py:12); 200 times so far"),
    ]


def test_another_line_of_code_or_cause_is_another_failure():
    counts = FailureCounts()
    others = [failure(), failure(line=13), failure(cause=FailureCause.PROMPT)]
    assert all(counts.add(other, now_s=at) for at, other in enumerate(others))
    assert [one.latest for one in counts] == others[::-1]


@pytest.mark.parametrize("cause", FailureCause)
def test_a_failure_travels_whole(cause):
    sent = failure(cause=cause)
    assert failure_from_message(failure_to_message(sent)) == sent


def test_a_long_text_from_the_wire_is_truncated_to_one_short_line():
    message = work_pb2.Failure(message="a\n" * 10_000, location="b" * 10_000)
    read = failure_from_message(message)
    assert (len(read.message), len(read.location)) == (500, 500)
    assert "\n" not in read.message
    assert one_line(" a \n\t b ") == "a b"


FILES = (work_pb2, policy_pb2, control_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
WORK = {f"/vcpo.wire.v1.WorkService/{name}" for name in ("Lease", "Submit", "Release")}
POLICY = {f"/vcpo.wire.v1.PolicyService/{name}" for name in ("GetManifest",)}
CONTROL = {
    f"/vcpo.wire.v1.ControlService/{name}"
    for name in ("GetSignals", "SetThrottle", "Drain", "ReleaseWorker")
}
ALLOWED = {"worker": WORK | POLICY, "steering": CONTROL}
KEYS = {role: f"key-of-{role}" for role in CallerRole}


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """A server with all services, none of whose methods does anything."""
    server = WireServer(keys=KEYS)
    work_pb2_grpc.add_WorkServiceServicer_to_server(
        work_pb2_grpc.WorkServiceServicer(), server.grpc_server
    )
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(
        policy_pb2_grpc.PolicyServiceServicer(), server.grpc_server
    )
    control_pb2_grpc.add_ControlServiceServicer_to_server(
        control_pb2_grpc.ControlServiceServicer(), server.grpc_server
    )
    port = await server.start("127.0.0.1:0", [])
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def status_of(channel: grpc.aio.Channel, method: str) -> str:
    call = channel.unary_stream(method)(b"", timeout=30.0)
    return (await call.code()).name


@pytest.mark.parametrize("role", list(CallerRole))
async def test_a_key_opens_the_methods_of_its_role_and_no_other(address, role):
    async with open_channel(address, key=KEYS[role]) as channel:
        refused = {
            method for method in METHODS if await status_of(channel, method) == "PERMISSION_DENIED"
        }
    assert METHODS - refused == ALLOWED[role]


def test_the_table_knows_every_method_and_no_other():
    assert set().union(*METHODS_OF.values()) == METHODS


@pytest.mark.parametrize(
    "shown", ["", "Bearer ", "key-of-worker", "Bearer key-of-worker ", "bearer key-of-worker"]
)
def test_what_is_not_a_whole_key_is_no_role(shown):
    assert role_of(shown, KEYS) is None
    assert role_of("Bearer key-of-worker", KEYS) is CallerRole.WORKER


def test_a_key_that_this_server_was_not_given_opens_nothing():
    assert role_of("Bearer key-of-steering", {CallerRole.WORKER: "key-of-worker"}) is None


def test_the_keys_of_a_run_differ_and_are_made_anew():
    one, other = new_run_keys(), new_run_keys()
    assert set(one) == set(RUN_ROLES)
    assert len({*one.values(), *other.values()}) == 4


def test_a_process_gets_the_keys_of_its_roles_and_empty_variables_for_the_others():
    assert key_variables(KEYS, [CallerRole.STEERING]) == {
        "VCPO_WORKER_KEY": "",
        "VCPO_STEERING_KEY": "key-of-steering",
    }


def test_keys_come_from_the_environment_without_a_newline_and_an_empty_one_is_none(monkeypatch):
    monkeypatch.setenv("VCPO_WORKER_KEY", "secret\n")
    monkeypatch.setenv("VCPO_STEERING_KEY", "")
    roles = (CallerRole.WORKER, CallerRole.STEERING)
    assert keys_from_environment(roles) == {CallerRole.WORKER: "secret"}


@pytest.mark.parametrize("key", ["\n", "two\nlines", "schlüssel", "tab\tinside"])
def test_a_key_that_no_header_carries_is_refused_by_name_and_not_shown(monkeypatch, key):
    monkeypatch.setenv("VCPO_WORKER_KEY", key)
    with pytest.raises(ValueError, match=r"^VCPO_WORKER_KEY: must be printable ASCII") as refused:
        keys_from_environment([CallerRole.WORKER])
    assert key not in str(refused.value)


NAME = "demo-learner"


@contextlib.asynccontextmanager
async def serve(folder, **options):
    """A server with the certificate of a folder, and its port."""
    server = WireServer(keys=None)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(Echo(), server.grpc_server)
    port = await server.start(
        "127.0.0.1:0", [SERVICE], certificates=CertificateFolder(folder), **options
    )
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def trusting(folder, name=NAME):
    return CertificateFolder(folder).trust(name)


async def refusal(channel):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await manifest(channel, timeout=3.0)
    return refused.value.code()


@pytest.mark.parametrize("case", ["plain text", "another authority", "another name"])
async def test_no_call_passes_without_the_authority_and_the_name(tmp_path, case):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_certificates(ours, [NAME])
    write_certificates(theirs, [NAME])
    trust = {
        "plain text": None,
        "another authority": trusting(theirs),
        "another name": trusting(ours, "other-learner"),
    }[case]
    async with serve(ours) as (_, address), open_channel(address, key=None, trust=trust) as channel:
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE


async def test_a_client_does_not_speak_to_a_server_in_plain_text(tmp_path):
    write_certificates(tmp_path, [NAME])
    server = WireServer(keys=None)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(Echo(), server.grpc_server)
    port = await server.start("127.0.0.1:0", [SERVICE])
    async with open_channel(f"127.0.0.1:{port}", key=None, trust=trusting(tmp_path)) as channel:
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


async def test_a_renewed_certificate_serves_new_connections_and_old_ones_go_on(tmp_path):
    served, renewed = tmp_path / "served", tmp_path / "renewed"
    write_certificates(served, [NAME])
    write_certificates(renewed, [NAME])
    before, after = trusting(served), trusting(renewed)
    async with serve(served) as (_, address), open_channel(address, key=None, trust=before) as old:
        assert await manifest(old) == 7
        for name in ("tls.crt", "tls.key"):
            (served / name).write_bytes((renewed / name).read_bytes())
        async with open_channel(address, key=None, trust=after) as new:
            assert await manifest(new) == 7
        async with open_channel(address, key=None, trust=before) as late:
            assert await refusal(late) is grpc.StatusCode.UNAVAILABLE
        assert await manifest(old) == 7


async def test_a_certificate_that_is_gone_leaves_the_last_one_in_use(tmp_path):
    write_certificates(tmp_path, [NAME])
    trust = trusting(tmp_path)
    async with serve(tmp_path) as (_, address):
        (tmp_path / "tls.key").unlink()
        async with open_channel(address, key=None, trust=trust) as channel:
            assert await manifest(channel) == 7


async def test_probes_have_a_port_in_plain_text_that_answers_nothing_else(tmp_path):
    write_certificates(tmp_path, [NAME])
    async with serve(tmp_path, health_address="127.0.0.1:0") as (server, _):
        probed = f"127.0.0.1:{server.health_port}"
        async with open_channel(probed, key=None) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await manifest(channel)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            await server.set_serving(serving=False)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("address", ["0.0.0.0:7600", "10.1.2.3:7600", "learner:7600", "[::]:7600"])
def test_plain_text_beyond_this_machine_must_be_asked_for_by_name(address):
    with pytest.raises(ValueError, match="--plain-text") as refused:
        checked_folder({"--listen": address}, None, plain_text=False)
    assert str(refused.value).startswith(f"--listen={address}: others could read along")
    assert checked_folder({"--listen": address}, None, plain_text=True) is None


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:7600", "[::1]:7600", "127.8.0.1:1"])
def test_this_machine_needs_no_certificates(address):
    assert checked_folder({"--listen": address}, None, plain_text=False) is None


def test_files_that_do_not_fit_are_refused_by_name(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    write_certificates(one, [NAME])
    write_certificates(other, [NAME])
    assert checked_folder({"--listen": "0.0.0.0:1"}, one, plain_text=False) is not None
    with pytest.raises(ValueError, match="--plain-text: contradicts --tls"):
        checked_folder({"--listen": "0.0.0.0:1"}, one, plain_text=True)
    (one / "tls.key").write_bytes((other / "tls.key").read_bytes())
    with pytest.raises(ValueError, match=r"tls\.crt, tls\.key and ca\.crt must be"):
        checked_folder({"--listen": "0.0.0.0:1"}, one, plain_text=False)
    with pytest.raises(OSError, match="No such file"):
        checked_folder({"--listen": "0.0.0.0:1"}, tmp_path / "none", plain_text=False)


async def test_who_trusts_nobody_calls_nobody(tmp_path):
    write_certificates(tmp_path, [NAME])
    async with (
        serve(tmp_path) as (_, address),
        open_channel(address, key=None, trust=NOBODY) as channel,
    ):
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE
