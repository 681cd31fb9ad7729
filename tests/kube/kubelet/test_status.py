"""Status that the fake kubelet reports."""

from dataclasses import replace

import pytest

from tests.fakes.kubelet.status import (
    ContainerState,
    phase,
    pod_status,
    restart_delay_s,
    termination,
)

FRESH = ContainerState(name="learner", image="vcpo-learner:1")
RUNNING = replace(FRESH, waiting=None, running_since="2026-01-01T00:00:00Z", started=True)
READY = replace(RUNNING, ready=True)


def make_end(exit_code, *, killed_by_us=False, tail=""):
    return termination(
        exit_code, killed_by_us=killed_by_us, started_at="t0", finished_at="t1", tail=tail
    )


def condition(status, kind):
    (found,) = [each for each in status["conditions"] if each["type"] == kind]
    return found


@pytest.mark.parametrize(
    ("exit_code", "killed_by_us", "reason", "code"),
    [
        (0, False, "Completed", 0),
        (2, False, "Error", 2),
        (-15, True, "Error", 143),
        (-9, True, "Error", 137),
        (-9, False, "OOMKilled", 137),
        (137, False, "Error", 137),
    ],
)
def test_an_end_has_the_reason_that_a_kubelet_gives(exit_code, killed_by_us, reason, code):
    told = make_end(exit_code, killed_by_us=killed_by_us)
    assert (told["reason"], told["exitCode"]) == (reason, code)


def test_the_last_words_of_a_failure_are_kept():
    assert make_end(1, tail="no such model")["message"] == "no such model"


def test_a_success_has_no_last_words():
    assert "message" not in make_end(0, tail="bye")


def test_last_words_are_bounded():
    assert len(make_end(1, tail="x" * 5000)["message"]) == 2048


def test_a_pod_is_pending_until_every_container_has_run():
    assert phase([RUNNING, FRESH]) == "Pending"


def test_a_pod_that_waits_to_restart_still_counts_as_running():
    waiting = replace(FRESH, waiting=("CrashLoopBackOff", ""), restarts=2)
    assert phase([waiting]) == "Running"


def test_one_failed_container_fails_a_finished_pod():
    good, bad = replace(FRESH, terminated=make_end(0)), replace(FRESH, terminated=make_end(3))
    assert (phase([good]), phase([good, bad])) == ("Succeeded", "Failed")


def test_a_pod_is_ready_when_all_its_containers_are():
    status = pod_status([READY, RUNNING], {}, pod_ip="127.70.0.1", now="t")
    assert condition(status, "Ready")["status"] == "False"


def test_a_conditions_time_stays_while_its_status_does():
    before = pod_status([READY], {}, pod_ip="127.70.0.1", now="t1")
    after = pod_status([READY], before, pod_ip="127.70.0.1", now="t2")
    assert condition(after, "Ready")["lastTransitionTime"] == "t1"


def test_a_conditions_time_moves_with_its_status():
    before = pod_status([READY], {}, pod_ip="127.70.0.1", now="t1")
    after = pod_status([RUNNING], before, pod_ip="127.70.0.1", now="t2")
    assert condition(after, "Ready")["lastTransitionTime"] == "t2"


@pytest.mark.parametrize(("restarts", "delay_s"), [(0, 0), (1, 10), (2, 20), (5, 160), (9, 300)])
def test_restarts_back_off_by_doubling_up_to_five_minutes(restarts, delay_s):
    assert restart_delay_s(restarts, first_s=10, last_s=300) == delay_s
