"""The functions of `tests.fixtures.rollout.models` as fixtures."""

import pytest

from tests.fixtures.rollout.models import (
    build_model,
    forward_logprobs,
    make_policy_weights,
    parameters_of,
    request_for,
)


@pytest.fixture(scope="session")
def make_model():
    return build_model


@pytest.fixture(scope="session")
def reference_logprobs():
    return forward_logprobs


@pytest.fixture(scope="session")
def make_request():
    return request_for


@pytest.fixture(scope="session")
def parameters():
    return parameters_of


@pytest.fixture(scope="session")
def publish():
    return make_policy_weights
