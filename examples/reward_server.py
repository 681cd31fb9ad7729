"""A reward server: scores a response by the characters it shares with the truth, in order.

    python examples/reward_server.py --listen 127.0.0.1:7070

A run uses it with

    environment:
      name: sort_digits
      rewards: [{name: server, parameters: {address: "127.0.0.1:7070"}}]

Replace `score` with your own judgement of a response.
"""

from __future__ import annotations

import argparse
import asyncio
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from vcpo.wire.access.roles import CallerRole, keys_from_environment
from vcpo.wire.access.tls import checked_folder
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import reward_pb2, reward_pb2_grpc

SERVICE = "vcpo.wire.v1.RewardService"


def score(prompt: str, answer: str, response: str) -> float:
    """Return the similarity of response and truth, in [0, 1]."""
    return SequenceMatcher(a=answer, b=response.strip(), autojunk=False).ratio()


class RewardService(reward_pb2_grpc.RewardServiceServicer):
    """Serves `score`."""

    async def Score(  # noqa: N802 - named by the contract
        self, request: reward_pb2.ScoreRequest, context: Any
    ) -> reward_pb2.ScoreResponse:
        """Judge one response."""
        reward = score(request.prompt, request.answer, request.response)
        return reward_pb2.ScoreResponse(reward=reward)


async def serve(listen: str, tls: Path | None, *, plain_text: bool) -> None:
    """Serve until the process is ended."""
    certificates = checked_folder({"--listen": listen}, tls, plain_text=plain_text)
    server = WireServer(keys=keys_from_environment([CallerRole.REWARD]) or None)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(RewardService(), server.grpc_server)
    port = await server.start(listen, (SERVICE,), certificates=certificates)
    print(f"judging on port {port}", flush=True)
    await server.grpc_server.wait_for_termination()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:7070", metavar="HOST:PORT")
    parser.add_argument("--tls", type=Path, metavar="DIR", help="folder of the certificates")
    parser.add_argument("--plain-text", action="store_true")
    options = parser.parse_args()
    asyncio.run(serve(options.listen, options.tls, plain_text=options.plain_text))


if __name__ == "__main__":
    main()
