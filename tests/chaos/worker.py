"""`python -m tests.chaos.worker`: a worker's own process, with a witness and kill points.

The witness stands at the generated stub, below the worker's code: it says what was submitted, what
the learner confirmed, and which weights the engine was given under which version.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import xxhash

from tests.chaos.recorder import write_message
from tests.chaos.wall_clock import CLOCK_VARIABLE, WallClock
from tests.chaos.witness import FLIP_WEIGHTS, ORDER_VARIABLE, Witness
from vcpo.wire.v1 import work_pb2, work_pb2_grpc
from vcpo_rollout.command import main
from vcpo_rollout.engines.engine import PolicyWeights
from vcpo_rollout.engines.hf.engine import HfEngine
from vcpo_rollout.environments.environment import Prompt
from vcpo_rollout.environments.sort_digits import SortDigits
from vcpo_rollout.transport import weight_files
from vcpo_rollout.transport.weight_files import ArrivingFile, WeightFiles


class ScatteredReward(SortDigits):
    """Rewards that no policy can learn, so that the responses to a prompt differ in them.

    A task that is solved, or too hard, has equal rewards: its steps are skipped, all versions have
    the same weights, and a wrong label is no lie.
    """

    def reward(self, prompt: Prompt, response: str) -> float:
        return xxhash.xxh3_64_intdigest(f"{prompt.text}|{response}".encode()) / 2**64


_CONFIRMED = (work_pb2.SUBMIT_OUTCOME_ACCEPTED, work_pb2.SUBMIT_OUTCOME_DUPLICATE)


def watch(witness: Witness) -> None:
    """Put the witness and the kill points into the stub and the engine."""
    make_stub = work_pb2_grpc.WorkServiceStub.__init__
    swap = HfEngine.swap_weights

    @wraps(make_stub)
    def watched_stub(self: Any, channel: Any) -> None:
        make_stub(self, channel)
        submit = self.Submit

        async def watched_submit(request: work_pb2.SubmitRequest, **options: Any) -> Any:
            if request.HasField("failure"):
                witness.say("failed", lease=request.lease_id)
            for each in request.trajectories:
                witness.say("submitted", id=each.trajectory_id, message=write_message(each))
            witness.die_at("submit")
            response = await submit(request, **options)
            witness.die_at("submitted")
            outcomes = zip(request.trajectories, response.outcomes, strict=False)
            confirmed = [each.trajectory_id for each, told in outcomes if told in _CONFIRMED]
            witness.say("confirmed", ids=confirmed)
            return response

        self.Submit = watched_submit

    @wraps(swap)
    async def watched_swap(self: HfEngine, weights: PolicyWeights) -> int:
        witness.die_at("swap")
        digest = xxhash.xxh3_64()
        digest.update(weights.payload)
        witness.say("swapped", version=weights.policy_version, digest=digest.hexdigest())
        running = await swap(self, weights)
        witness.die_at("swapped")
        return running

    read = WeightFiles.read

    @wraps(read)
    async def noisy_read(self: WeightFiles, manifest: Any, files: Sequence[ArrivingFile]) -> None:
        await read(self, manifest, files)
        with suppress(FileNotFoundError):
            (Path(os.environ[ORDER_VARIABLE]).parents[1] / FLIP_WEIGHTS).unlink()
            files[-1].content[-1] ^= 1  # the last byte is a tensor's

    WeightFiles.read = noisy_read  # type: ignore[method-assign]
    weight_files.is_seen = lambda _: False  # as if it were another machine
    work_pb2_grpc.WorkServiceStub.__init__ = watched_stub  # type: ignore[method-assign]
    HfEngine.swap_weights = watched_swap  # type: ignore[method-assign]


if __name__ == "__main__":
    WallClock(Path(os.environ[CLOCK_VARIABLE])).install()
    watch(Witness.from_environment())
    raise SystemExit(main())
