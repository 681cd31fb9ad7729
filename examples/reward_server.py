"""A reward server: scores a response by the characters it shares with the truth, in order.

    python examples/reward_server.py --listen 127.0.0.1:7070

A run uses it with

    environment:
      name: remote
      parameters: {reward: "127.0.0.1:7070", environment: sort_digits}

Replace `score` with your own judgement of a response.
"""

from __future__ import annotations

import argparse
import asyncio
from difflib import SequenceMatcher
from typing import Any

from vcpo.wire.access.roles import CallerRole, keys_from_environment
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


async def serve(listen: str) -> None:
    """Serve until the process is ended."""
    server = WireServer(keys=keys_from_environment([CallerRole.REWARD]) or None)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(RewardService(), server.grpc_server)
    port = await server.start(listen, (SERVICE,))
    print(f"judging on port {port}", flush=True)
    await server.grpc_server.wait_for_termination()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:7070", metavar="HOST:PORT")
    asyncio.run(serve(parser.parse_args().listen))


if __name__ == "__main__":
    main()
