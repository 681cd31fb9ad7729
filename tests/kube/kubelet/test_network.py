"""Names and addresses in the fake kubelet's cluster."""

import base64

import pytest

from tests.fakes.kubelet.network import (
    LoopbackAddresses,
    NameNotFoundError,
    endpoints,
    parse_connect,
    split_name,
    target_port,
)


def pod(address="127.70.0.1", *, ready=True, leaving=False, labels=(("app", "x"),)):
    metadata = {"name": "p", "labels": dict(labels)}
    if leaving:
        metadata["deletionTimestamp"] = "t"
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    ports = [{"name": "grpc", "containerPort": 7600}]
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "main", "ports": ports}]},
        "status": {"podIP": address, "conditions": conditions},
    }


def service(*, headless=True, unready_too=False):
    return {
        "metadata": {"name": "s"},
        "spec": {
            "clusterIP": "None" if headless else "10.0.0.1",
            "publishNotReadyAddresses": unready_too,
            "selector": {"app": "x"},
            "ports": [{"port": 80, "targetPort": "grpc"}],
        },
    }


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("learner", ("team", "learner")),
        ("learner.other", ("other", "learner")),
        ("learner.other.svc", ("other", "learner")),
        ("learner.other.svc.cluster.local", ("other", "learner")),
    ],
)
def test_a_services_name_may_be_short_or_full(host, place):
    assert split_name(host, "team") == place


def test_a_name_of_the_internet_is_not_found():
    with pytest.raises(NameNotFoundError, match=r"www\.example\.org"):
        split_name("www.example.org", "team")


def test_pods_that_are_not_ready_are_left_out():
    assert endpoints(service(), [pod(ready=False)]) == []


def test_a_service_may_publish_pods_that_are_not_ready():
    unready = pod(ready=False)
    assert endpoints(service(unready_too=True), [unready]) == [unready]


@pytest.mark.parametrize("other", [pod(leaving=True), pod(labels=()), pod(address="")])
def test_pods_that_leave_or_are_others_or_have_no_address_are_left_out(other):
    assert endpoints(service(unready_too=True), [other]) == []


def test_a_headless_service_does_not_change_the_port():
    assert target_port(service(), pod(), 7600) == 7600


def test_a_port_of_a_service_leads_to_the_containers_port():
    assert target_port(service(headless=False), pod(), 80) == 7600


def test_a_port_that_a_service_lacks_is_not_found():
    with pytest.raises(NameNotFoundError, match="81"):
        target_port(service(headless=False), pod(), 81)


def test_a_connect_request_tells_its_callers_namespace():
    credentials = base64.b64encode(b"team:").decode()
    head = f"CONNECT learner:7600 HTTP/1.0\r\nProxy-Authorization: Basic {credentials}\r\n\r\n"
    assert parse_connect(head) == ("learner", 7600, "team")


def test_only_connect_requests_are_served():
    with pytest.raises(OSError, match="GET /"):
        parse_connect("GET / HTTP/1.1\r\n\r\n")


def test_no_two_pods_have_one_address():
    addresses = LoopbackAddresses(seed=1)
    assert len({addresses.take() for _ in range(254)}) == 254


def test_an_address_given_back_can_be_taken_again():
    addresses = LoopbackAddresses(seed=1)
    taken = [addresses.take() for _ in range(254)]
    addresses.give_back(taken[7])
    assert addresses.take() == taken[7]
