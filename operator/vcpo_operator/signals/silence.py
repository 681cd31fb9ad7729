"""Why a learner that should answer does not: name, network, certificate or key. Pure.

gRPC reports all of them as UNAVAILABLE or as a deadline that passed; only the details differ.
"""

from __future__ import annotations

import re
from typing import Final

import grpc

from vcpo.learner_control import call_failure
from vcpo_operator.observed.records import Cause

_BY_DETAILS: Final = (
    (
        re.compile(r"DNS resolution failed|errors resolving|Domain name not found", re.IGNORECASE),
        "NameNotResolved",
        "check the cluster's DNS, and that a network policy lets the operator reach it",
    ),
    (
        re.compile(r"handshake|certificate|SSL|TSI_", re.IGNORECASE),
        "CertificateRefused",
        "the certificate is not trusted: suspend and resume the run, or see `pods.tlsSecretName`",
    ),
    (
        re.compile(r"connection refused", re.IGNORECASE),
        "ConnectionRefused",
        "nothing listens there: see the learner's log",
    ),
)
_BLOCKED: Final = (
    "network policies, of the run's namespace and of the operator's, must allow port 7600 between"
    " them"
)


def silence_cause(error: grpc.aio.AioRpcError | ValueError) -> Cause:
    """Return why a call of the learner failed, with the cure."""
    told = call_failure(error)
    if isinstance(error, ValueError):
        return Cause(reason="SignalsInvalid", message=f"{told}: its image is of another version")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        cure = "its pod is older than the Secret of keys: suspend and resume the run"
        return Cause(reason="KeyRefused", message=f"{told}: {cure}")
    for details, reason, cure in _BY_DETAILS:
        if details.search(told):
            return Cause(reason=reason, message=f"{told}: {cure}")
    if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
        return Cause(reason="Unreachable", message=f"{told}: {_BLOCKED}")
    return Cause(reason="CallFailed", message=told)
