"""The phase of a run in messages."""

from vcpo.records.reasons import RunPhase
from vcpo.wire.v1 import work_pb2

__all__ = ["RunPhase", "phase_from_message", "phase_to_message"]

_TO_WIRE = {
    RunPhase.RUNNING: work_pb2.RUN_PHASE_RUNNING,
    RunPhase.DRAINING: work_pb2.RUN_PHASE_DRAINING,
    RunPhase.COMPLETE: work_pb2.RUN_PHASE_COMPLETE,
    RunPhase.FAILED: work_pb2.RUN_PHASE_FAILED,
}
_FROM_WIRE = {number: phase for phase, number in _TO_WIRE.items()}


def phase_to_message(phase: RunPhase) -> work_pb2.RunPhase.ValueType:
    """Return the wire enum of a phase."""
    return _TO_WIRE[phase]


def phase_from_message(number: work_pb2.RunPhase.ValueType) -> RunPhase:
    """Read a phase; an unknown number counts as running."""
    return _FROM_WIRE.get(number, RunPhase.RUNNING)
