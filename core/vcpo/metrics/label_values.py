"""Closed sets of label values that only metrics have."""

from enum import StrEnum


class Stage(StrEnum):
    """What the learner's time goes to."""

    WAIT = "wait"
    SCORE = "score"
    """Forward passes that score tokens."""
    BACKWARD = "backward"
    """Backward passes, with the forward passes they need."""
    OPTIMIZER = "optimizer"
    """The decision about the step, and the step."""
    PUBLISH = "publish"
    """Preparing and publishing the new version."""
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"
    """Evaluations for which training waits; those beside training take none of its time."""


class MemoryState(StrEnum):
    """Memory of a GPU, as PyTorch's allocator counts it."""

    RESERVED = "reserved"
    PEAK = "peak"
    """Most memory allocated since the start."""
    TOTAL = "total"


class WeightForm(StrEnum):
    """Form in which a policy version is sent."""

    FULL = "full"
    DELTA = "delta"


class SampleOutcome(StrEnum):
    """What became of a trajectory on a worker."""

    ACCEPTED = "accepted"
    LEASE_ENDED = "lease_ended"
    RELEASED = "released"
    ENVIRONMENT_FAILED = "environment_failed"
    ENGINE_FAILED = "engine_failed"


class WeightSource(StrEnum):
    """Where a worker read weights."""

    STORE = "store"
    """In the store itself: a folder that its machine sees, or an object store."""
    SERVER = "server"


class EnvironmentFault(StrEnum):
    """How a call to the environment failed."""

    TIMEOUT = "timeout"
    RAISED = "raised"


class ReplicaState(StrEnum):
    """Which workers of a rollout group are counted."""

    DESIRED = "desired"
    READY = "ready"


class ThrottleDirection(StrEnum):
    """Direction in which the lag limit changed."""

    TIGHTEN = "tighten"
    RELAX = "relax"


class ReconcileResult(StrEnum):
    """What came of one reconcile of a run."""

    OK = "ok"
    ERROR = "error"
    BUG = "bug"
