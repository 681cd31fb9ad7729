"""Which key opens which method, over a real server and real channels."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from vcpo.wire.access.roles import (
    METHODS_OF,
    RUN_ROLES,
    CallerRole,
    key_variables,
    keys_from_environment,
    new_run_keys,
    role_of,
)
from vcpo.wire.client import open_channel
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import (
    control_pb2,
    control_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    work_pb2,
    work_pb2_grpc,
)

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
ALLOWED = {
    "worker": WORK | POLICY,
    "steering": CONTROL,
}
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


def test_keys_come_from_the_environment_and_an_empty_one_is_none(monkeypatch):
    monkeypatch.setenv("VCPO_WORKER_KEY", "w")
    monkeypatch.setenv("VCPO_STEERING_KEY", "")
    assert keys_from_environment(RUN_ROLES) == {CallerRole.WORKER: "w"}


def test_a_process_gets_the_keys_of_its_roles_and_empty_variables_for_the_others():
    assert key_variables(KEYS, [CallerRole.STEERING]) == {
        "VCPO_WORKER_KEY": "",
        "VCPO_STEERING_KEY": "key-of-steering",
    }


def test_a_key_from_a_file_is_read_without_the_newline_at_its_end(monkeypatch):
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
