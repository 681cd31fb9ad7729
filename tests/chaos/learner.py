"""`python -m tests.chaos.learner`: the learner's own process, with a witness and kill points.

The witness says what the optimizer was given, which versions were published, and which accepted
responses the ledger holds or has let go of, and why. Nothing of it comes from the learner's books:
the batch is read where it enters the update, the weights where they are announced.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import xxhash

from tests.chaos.witness import PAYLOADS_VARIABLE, Witness, content_digest
from vcpo.wire.trajectory import Trajectory
from vcpo_learner import app
from vcpo_learner.__main__ import main
from vcpo_learner.checkpoints.folder import CheckpointFolder
from vcpo_learner.ledger.contents import LedgerContents
from vcpo_learner.redo_log.file import LogFile
from vcpo_learner.training.mirrored_update import MirroredUpdate
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks
from vcpo_learner.training.recovery import Recovery
from vcpo_learner.weights.store import PolicyStore, PublishedPolicy


def watch(witness: Witness, payloads: Path) -> None:
    """Put the witness and the kill points into the product's classes."""
    PolicyOnRanks.load = witness.after("start", PolicyOnRanks.load)
    LogFile.append = witness.after("committed", witness.before("commit", LogFile.append))
    # Between the tensors and the manifest, and between the new folder's name and the log.
    CheckpointFolder.complete = witness.before("save", CheckpointFolder.complete)
    CheckpointFolder.remove_old = witness.before("saved", CheckpointFolder.remove_old)
    MirroredUpdate.finish = _watched_finish(witness)
    PolicyStore.publish = _watched_publish(witness, payloads)
    for method in ("grant", "end", "drop", "roll_back"):
        setattr(LedgerContents, method, _watched_change(witness, method))
    Recovery.resume = _watched_resume(witness)


def _watched_finish(witness: Witness) -> Callable[..., Any]:
    finish = MirroredUpdate.finish

    @wraps(finish)
    def watched(self: MirroredUpdate, pending: Any, *rest: Any) -> Any:
        result = finish(self, pending, *rest)
        witness.die_at("step")
        # Pairs, so that a response that stands in a batch twice is seen twice.
        content = [(each.trajectory_id, digest_of(each)) for each in pending.trajectories]
        witness.say("trained", version=pending.policy_version, content=content)
        return result

    return watched


def _watched_publish(witness: Witness, payloads: Path) -> Callable[..., None]:
    publish = PolicyStore.publish

    @wraps(publish)
    def watched(self: PolicyStore, policy: PublishedPolicy) -> None:
        version = policy.manifest.policy_version
        digest = xxhash.xxh3_64_hexdigest(policy.full_set.buffer)
        witness.die_at("publish")
        partial = payloads / f".{os.getpid()}"
        partial.write_bytes(policy.full_set.buffer)
        partial.replace(payloads / f"{version}-{digest}.safetensors")
        witness.say("published", version=version, digest=digest)
        publish(self, policy)
        witness.die_at("published")

    return watched


def _watched_change(witness: Witness, method: str) -> Callable[..., Any]:
    """A change that may let go of accepted responses; the witness says which, and the reason."""
    change_contents = getattr(LedgerContents, method)

    @wraps(change_contents)
    def watched(self: LedgerContents, change: Any, *rest: Any) -> Any:
        # A roll back takes what later steps had consumed back first.
        returned = [
            one
            for steps in rest
            for step in steps
            for group in step.groups
            for one in group.trajectories
        ]
        before = waiting_ids(self) | {each.trajectory_id for each in returned}
        result = change_contents(self, change, *rest)
        if gone := sorted(before - waiting_ids(self)):
            reason = getattr(change, "reason", None) or type(change).__name__
            witness.say("dropped", ids=gone, reason=str(reason))
        return result

    return watched


def _watched_resume(witness: Witness) -> Callable[[Recovery], int]:
    resume = Recovery.resume

    @wraps(resume)
    def watched(self: Recovery) -> int:
        step = resume(self)
        contents = self._dispatcher.ledger.contents
        # A recorded step that will be redone holds its responses too.
        redone = [
            each for step in self.steps for group in step.groups for each in group.trajectories
        ]
        held = waiting_ids(contents) | {each.trajectory_id for each in redone}
        witness.say("resumed", step=step, ids=sorted(held))
        witness.die_at("resume")
        return step

    return watched


def waiting_ids(contents: LedgerContents) -> set[str]:
    """Ids of the accepted responses that the ledger holds."""
    return {each.trajectory_id for group in contents.accepted() for each in group}


def digest_of(trajectory: Trajectory) -> str:
    """Digest of a response as the update reads it."""
    return content_digest(
        prompt=list(trajectory.prompt_token_ids),
        response=list(trajectory.response_token_ids),
        logprobs=list(trajectory.rollout_logprobs),
        spans=[(span.policy_version, span.num_tokens) for span in trajectory.version_spans],
        reward=trajectory.reward,
    )


def _run() -> int:
    """Run the learner; at its end the witness says what still waits."""
    witness = Witness.from_environment()
    watch(witness, Path(os.environ[PAYLOADS_VARIABLE]))
    built: list[LedgerContents] = []
    make = app.TrajectoryLedger

    def remembered(**options: Any) -> Any:
        ledger = make(**options)
        built.append(ledger.contents)
        return ledger

    app.TrajectoryLedger = remembered  # type: ignore[assignment, misc]
    status = main()
    waiting = waiting_ids(built[-1]) if built else set()
    witness.say("ended", status=status, ids=sorted(waiting))
    return status


if __name__ == "__main__":
    raise SystemExit(_run())
