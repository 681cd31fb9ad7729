"""Phases and their numbers on the wire."""

from __future__ import annotations

import pytest

from vcpo.wire.phase import RunPhase, phase_from_message, phase_to_message
from vcpo.wire.v1 import work_pb2


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        (RunPhase.RUNNING, work_pb2.RUN_PHASE_RUNNING),
        (RunPhase.DRAINING, work_pb2.RUN_PHASE_DRAINING),
        (RunPhase.COMPLETE, work_pb2.RUN_PHASE_COMPLETE),
        (RunPhase.FAILED, work_pb2.RUN_PHASE_FAILED),
    ],
)
def test_a_phase_has_its_number_in_both_directions(phase, number):
    assert phase_to_message(phase) == number
    assert phase_from_message(number) is phase


def test_every_phase_of_the_wire_but_the_unspecified_is_ours():
    numbers = set(work_pb2.RunPhase.values()) - {work_pb2.RUN_PHASE_UNSPECIFIED}
    assert numbers == {phase_to_message(phase) for phase in RunPhase}


@pytest.mark.parametrize("number", [work_pb2.RUN_PHASE_UNSPECIFIED, 99])
def test_a_phase_not_known_here_counts_as_running(number):
    assert phase_from_message(number) is RunPhase.RUNNING
