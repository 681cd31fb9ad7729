"""`python -m tests.chaos.learner`: the learner's own process, with a witness and kill points.

The witness says what the optimizer was given, which versions were published, and which accepted
responses the ledger holds or has let go of, and why. Nothing of it comes from the learner's books:
the batch is read where it enters the update, the weights where they are announced.
"""

import os
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import xxhash

from tests.chaos.wall_clock import CLOCK_VARIABLE, WallClock
from tests.chaos.witness import PAYLOADS_VARIABLE, ROLL_BACK, Witness, content_digest
from vcpo.algo.health.guards import RollbackNeed
from vcpo.wire.trajectory import Trajectory
from vcpo.wire.v1 import ledger_pb2
from vcpo.wire.v1.policy_pb2 import PolicyManifest
from vcpo_learner import app
from vcpo_learner.checkpoints.folder import Checkpoint, CheckpointFolder
from vcpo_learner.command import main
from vcpo_learner.ledger import redo_log
from vcpo_learner.ledger.ledger import TrajectoryLedger
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks
from vcpo_learner.training.recovery import Recovery, Rollback
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.update.run_health import RunHealth
from vcpo_learner.weights.store import PolicyStore

_LETTING_GO = (ledger_pb2.LeaseGranted, ledger_pb2.LeaseEnded, ledger_pb2.GroupsDropped)
"""Changes after which the ledger may hold less of what it has accepted."""


def watch(witness: Witness, payloads: Path) -> None:
    """Put the witness and the kill points into the product's classes."""
    PolicyOnRanks.load = witness.after("start", PolicyOnRanks.load)
    write = redo_log._write_frame
    redo_log._write_frame = witness.after("committed", witness.before("commit", write))
    # Between the tensors and the manifest, and between the new folder's name and the log.
    CheckpointFolder.complete = witness.before("save", CheckpointFolder.complete)
    CheckpointFolder.remove_old = witness.before("saved", CheckpointFolder.remove_old)
    PolicyUpdate.begin = _watched_begin(witness)
    PolicyUpdate.finish = _watched_finish(witness)
    PolicyStore.publish = _watched_publish(witness, payloads)
    TrajectoryLedger._apply = watched_apply(witness)
    TrajectoryLedger.drop_late = _watched_drop_late(witness)
    TrajectoryLedger.set_aside = _watched_set_aside(witness)
    Recovery.resume = _watched_resume(witness)
    Rollback._go_back_to = watched_rollback(witness)
    need = RunHealth.rollback_need.fget
    RunHealth.rollback_need = property(
        lambda health: RollbackNeed.DUE if witness.takes(ROLL_BACK) else need(health)
    )


def _watched_begin(witness: Witness) -> Callable[..., Any]:
    begin = PolicyUpdate.begin

    @wraps(begin)
    def watched(self: PolicyUpdate, groups: Any, **named: Any) -> Any:
        ids = [each.trajectory_id for group in groups for each in group]
        try:
            return begin(self, groups, **named)
        except Exception:
            witness.say("broken", ids=ids)
            raise

    return watched


def _watched_finish(witness: Witness) -> Callable[..., Any]:
    finish = PolicyUpdate.finish

    @wraps(finish)
    def watched(self: PolicyUpdate, newest: Any = ()) -> Any:
        pending: Any = self._pending
        result = finish(self, newest)
        witness.die_at("step")
        # Pairs, so that a response that stands in a batch twice is seen twice.
        content = [(each.trajectory_id, digest_of(each)) for each in pending.trajectories]
        fresh = [each.trajectory_id for each in newest]
        said = {"content": content, "fresh": fresh, "rate": result.learning_rate_backoff}
        witness.say("trained", version=pending.policy_version, **said)
        return result

    return watched


def _watched_publish(witness: Witness, payloads: Path) -> Callable[..., None]:
    publish = PolicyStore.publish

    @wraps(publish)
    def watched(self: PolicyStore, manifest: PolicyManifest) -> None:
        version = manifest.policy_version
        digest = xxhash.xxh3_64_hexdigest(self.content)
        witness.die_at("publish")
        partial = payloads / f".{os.getpid()}"
        partial.write_bytes(self.content)
        partial.replace(payloads / f"{version}-{digest}.safetensors")
        witness.say("published", version=version, digest=digest)
        publish(self, manifest)
        witness.die_at("published")

    return watched


def watched_apply(witness: Witness) -> Callable[..., Any]:
    """Changes that may let go of accepted responses; the witness says which, and the reason.

    The reason is the one under which the ledger counts them. Responses that it does not count have
    none.
    """
    apply = TrajectoryLedger._apply

    @wraps(apply)
    def watched(self: TrajectoryLedger, change: Any) -> None:
        if not isinstance(change, _LETTING_GO):
            apply(self, change)
            return
        step = self.step
        is_drop = isinstance(change, ledger_pb2.GroupsDropped)
        buffered = buffered_groups(self) if is_drop else []
        before, counted = waiting_groups(self), Counter(self.counts().dropped)
        apply(self, change)
        held = waiting_ids(self)
        gone = [[each for each in group if each not in held] for group in before]
        if gone := [group for group in gone if group]:
            newly = Counter(self.counts().dropped) - counted
            reasons = [str(why) for why, number in newly.items() if number >= sum(map(len, gone))]
            witness.say(
                "dropped", groups=gone, reason=" or ".join(reasons), step=step, buffered=buffered
            )
        if isinstance(change, ledger_pb2.LeaseGranted):
            number = self._open_lease(change.lease_id).num_trajectories
            witness.say("granted", lease=change.lease_id, number=number, worker=change.worker_id)

    return watched


def _watched_drop_late(witness: Witness) -> Callable[..., None]:
    """The witness says which tighter limit there is, when it changes."""
    drop_late = TrajectoryLedger.drop_late
    said: int | None = None

    @wraps(drop_late)
    def watched(self: TrajectoryLedger, **limits: Any) -> None:
        nonlocal said
        if (limit := limits["lag_limit_steps"]) != said:
            said = limit
            witness.say("limited", lag_steps=limit)
        drop_late(self, **limits)

    return watched


def _watched_set_aside(witness: Witness) -> Callable[..., None]:
    set_aside = TrajectoryLedger.set_aside

    @wraps(set_aside)
    def watched(self: TrajectoryLedger, worker_id: str) -> None:
        witness.say("set_aside", worker=worker_id)
        set_aside(self, worker_id)

    return watched


def _watched_resume(witness: Witness) -> Callable[[Recovery], int]:
    resume = Recovery.resume

    @wraps(resume)
    def watched(self: Recovery) -> int:
        step = resume(self)
        held = waiting_ids(self.dispatcher.ledger)
        witness.say("resumed", step=step, ids=sorted(held))
        witness.die_at("resume")
        return step

    return watched


def watched_rollback(witness: Witness) -> Callable[..., Any]:
    """The witness says from which step to which one a run went back."""
    go_back = Rollback._go_back_to

    @wraps(go_back)
    async def watched(self: Rollback, checkpoint: Checkpoint) -> None:
        await go_back(self, checkpoint)
        witness.say("rolled_back", step=self._step, to=checkpoint.step)

    return watched


def waiting_groups(ledger: TrajectoryLedger) -> list[list[str]]:
    """Ids of the accepted responses that the ledger holds, by group."""
    leases = (*ledger.leases.all(), *ledger.buffer.groups(), *ledger.requeued)
    return [[each.trajectory_id for each in lease.trajectories] for lease in leases]


def buffered_groups(ledger: TrajectoryLedger) -> list[list[str]]:
    """Ids of the complete groups that wait for their step, in the order of their grants."""
    return [
        [each.trajectory_id for each in group.trajectories]
        for group in sorted(ledger.buffer.groups())
    ]


def waiting_ids(ledger: TrajectoryLedger) -> set[str]:
    """Ids of the accepted responses that the ledger holds."""
    return {each for group in waiting_groups(ledger) for each in group}


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
    WallClock(Path(os.environ[CLOCK_VARIABLE])).install()
    witness = Witness.from_environment()
    watch(witness, Path(os.environ[PAYLOADS_VARIABLE]))
    built: list[TrajectoryLedger] = []
    make = app.TrajectoryLedger

    def remembered(**options: Any) -> Any:
        ledger = make(**options)
        built.append(ledger)
        return ledger

    app.TrajectoryLedger = remembered  # type: ignore[assignment, misc]
    status = main()
    waiting = waiting_ids(built[-1]) if built else set()
    witness.say("ended", status=status, ids=sorted(waiting))
    return status


if __name__ == "__main__":
    raise SystemExit(_run())
