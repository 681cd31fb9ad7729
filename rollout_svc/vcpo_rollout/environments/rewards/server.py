"""A user's server judges responses, over gRPC.

Prompt, ground truth, metadata and response go to a `RewardService`
(`protos/vcpo/wire/v1/reward.proto`), which may run a reward model, a compiler farm or a database.
"""

import json
from pathlib import Path
from typing import Final

import grpc

from vcpo.service.lifecycle import split_address
from vcpo.wire.access.roles import CallerRole, authorization, keys_from_environment
from vcpo.wire.access.tls import is_loopback
from vcpo.wire.limits import CHANNEL_OPTIONS
from vcpo.wire.v1 import reward_pb2, reward_pb2_grpc
from vcpo_rollout.environments.environment import Prompt
from vcpo_rollout.environments.parameters import parse_seconds

_SERVICE_CONFIG: Final = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": "vcpo.wire.v1.RewardService"}],
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.2s",
                    "maxBackoff": "5s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED"],
                },
            }
        ]
    }
)
"""gRPC itself retries, with jitter; it allows at most five attempts."""


class RewardServer:
    """The judgement of the server at `address` (`host:port`).

    authority: File with the authority of the server's certificate, PEM; None calls in plain text.
    plain_text: Whether calls in plain text may leave this machine.
    timeout_seconds: Limit for one reward, including the wait for the server to start and retries.
        After it the prompt counts as failed and is leased again.

    Every call shows the key in `VCPO_REWARD_KEY`, if there is one. Raises ValueError, naming the
    parameter, when address, file or time is wrong.
    """

    def __init__(
        self,
        *,
        address: str,
        timeout_seconds: float = 60.0,
        authority: str | None = None,
        plain_text: bool = False,
    ) -> None:
        try:
            split_address(address)
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"environment.parameters.address: {address!r} is not an address; "
                "write host:port of the reward server"
            ) from error
        _check_transport(address, authority, plain_text=plain_text)
        self._timeout_s = parse_seconds("timeout_seconds", timeout_seconds, highest=3600.0)
        self._stub = reward_pb2_grpc.RewardServiceStub(_open_channel(address, authority))
        keys = keys_from_environment([CallerRole.REWARD])
        self._metadata = tuple(authorization(key) for key in keys.values())

    def __call__(self, prompt: Prompt, response: str) -> float:
        """Return the server's reward.

        Raises: grpc.RpcError when the server refuses, or does not respond in time.
        """
        request = reward_pb2.ScoreRequest(
            prompt=prompt.text,
            answer=prompt.answer,
            response=response,
            metadata=json.dumps(dict(prompt.metadata), default=str),
        )
        result = self._stub.Score(
            request, timeout=self._timeout_s, metadata=self._metadata, wait_for_ready=True
        )
        return result.reward


def _check_transport(address: str, authority: str | None, *, plain_text: bool) -> None:
    """Check that the key and the prompts are readable by others only if the user says so.

    Raises: ValueError, naming the parameter.
    """
    parameter = "environment.parameters.plain_text"
    if not isinstance(plain_text, bool):
        raise ValueError(f"{parameter}: {plain_text!r} is neither true nor false")  # noqa: TRY004
    if plain_text and authority is not None:
        raise ValueError(f"{parameter}: contradicts `authority`; leave one of them out")
    if not plain_text and authority is None and not is_loopback(address):
        raise ValueError(
            f"environment.parameters.address: others could read along with calls to {address!r};"
            " name the `authority` of its certificate, or set `plain_text` to true"
        )


def _open_channel(address: str, authority: str | None) -> grpc.Channel:
    """Open a channel to the server; in plain text without an authority.

    Raises: ValueError when the file cannot be read.
    """
    options = (*CHANNEL_OPTIONS, ("grpc.service_config", _SERVICE_CONFIG))
    if authority is None:
        return grpc.insecure_channel(address, options)
    try:
        trusted = Path(authority).read_bytes()
    except OSError as error:
        raise ValueError(
            f"environment.parameters.authority: {authority!r} cannot be read ({error.strerror});"
            " name a file with the certificate of the server's authority"
        ) from error
    credentials = grpc.ssl_channel_credentials(root_certificates=trusted)
    return grpc.secure_channel(address, credentials, options)
