"""The work queue: no key twice at once, none missed, and back-off after a failure."""

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from tests.fixtures.operator.operator import (
    DEFINITIONS,
    KEY,
    RUN,
    OperatorFixture,
    operator_fixture,
    signals,
)
from tests.fixtures.operator.runs import run_definition
from vcpo.wire.phase import RunPhase
from vcpo_operator.cluster_api.run_secrets import first_end_s, renewed_certificates
from vcpo_operator.names import RunKey
from vcpo_operator.observed.parse import secret_data
from vcpo_operator.reconcile.loop import LONGEST_BACKOFF_S, RunQueue

A, B = RunKey("ml", "a"), RunKey("ml", "b")


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(name="clock")
def make_clock() -> Clock:
    return Clock()


@pytest.fixture(name="queue")
def make_queue(clock: Clock) -> RunQueue:
    return RunQueue(clock=clock, jitter=lambda: 0.0)


async def take(queue: RunQueue) -> RunKey | None:
    """The run that is due now; None when nobody would get one without waiting."""
    taking = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return taking.result() if taking.done() or not taking.cancel() else None


async def test_a_key_that_is_added_twice_is_reconciled_once(queue: RunQueue):
    queue.add(A)
    queue.add(A)
    assert await take(queue) == A
    queue.finish(A)
    assert await take(queue) is None


async def test_the_one_due_first_comes_first(queue: RunQueue, clock: Clock):
    queue.add(A, 5.0)
    queue.add(B, 1.0)
    clock.now_s += 10.0
    assert [await take(queue), await take(queue)] == [B, A]


async def test_a_run_is_never_reconciled_twice_at_once(queue: RunQueue):
    queue.add(A)
    await take(queue)
    queue.add(A)
    assert await take(queue) is None


async def test_a_key_added_during_its_reconciliation_is_reconciled_after_it(queue: RunQueue):
    queue.add(A)
    await take(queue)
    queue.add(A)
    queue.finish(A)
    assert await take(queue) == A


async def test_an_event_brings_a_wake_up_forward(queue: RunQueue):
    queue.add(A, 60.0)
    queue.add(A)
    assert await take(queue) == A


async def test_a_wake_up_does_not_put_an_event_off(queue: RunQueue):
    queue.add(A)
    queue.add(A, 60.0)
    assert await take(queue) == A


async def fail(queue: RunQueue, clock: Clock, times: int) -> None:
    for _ in range(times):
        clock.now_s += LONGEST_BACKOFF_S
        queue.add(A)
        await take(queue)
        queue.finish(A, failed=True)


@pytest.mark.parametrize(("times", "wait_s"), [(1, 0.5), (2, 1.0), (4, 4.0), (30, 150.0)])
async def test_failures_double_the_wait_up_to_a_bound(
    queue: RunQueue, clock: Clock, times: int, wait_s: float
):
    await fail(queue, clock, times)
    clock.now_s += wait_s - 0.01
    assert await take(queue) is None
    clock.now_s += 0.01
    assert await take(queue) == A


async def test_events_do_not_hurry_a_run_that_backs_off(queue: RunQueue, clock: Clock):
    await fail(queue, clock, 5)
    queue.add(A)
    assert await take(queue) is None


async def test_a_run_that_was_edited_is_reconciled_at_once(queue: RunQueue, clock: Clock):
    await fail(queue, clock, 5)
    queue.reset_backoff(A)
    queue.add(A)
    assert await take(queue) == A


async def test_success_forgets_the_failures(queue: RunQueue, clock: Clock):
    await fail(queue, clock, 5)
    clock.now_s += LONGEST_BACKOFF_S
    await take(queue)
    queue.finish(A)
    await fail(queue, clock, 1)
    clock.now_s += 0.5
    assert await take(queue) == A


async def test_the_servers_retry_after_is_obeyed(queue: RunQueue, clock: Clock):
    queue.add(A)
    await take(queue)
    queue.finish(A, failed=True, retry_after_s=20.0)
    clock.now_s += 19.0
    assert await take(queue) is None


async def test_the_oldest_wait_is_reported(queue: RunQueue, clock: Clock):
    queue.add(A)
    clock.now_s += 7.0
    assert queue.oldest_s() == 7.0


async def test_a_run_that_fails_for_days_still_has_a_backoff(queue, clock):
    for _ in range(2_000):  # 2.0 ** 1024 is no float
        queue.add(A)
        clock.now_s += LONGEST_BACKOFF_S
        assert await take(queue) == A
        queue.finish(A, failed=True)
    assert queue.oldest_s() == 0.0


async def test_a_namespace_that_is_slow_leaves_workers_to_the_others(clock: Clock):
    queue = RunQueue(clock=clock, most_of_namespace=2)
    slow = [RunKey("slow", name) for name in "abc"]
    for key in slow:
        queue.add(key)
    clock.now_s += 10.0
    queue.add(A)
    assert {await take(queue), await take(queue)} == set(slow[:2])
    assert await take(queue) == A
    assert await take(queue) is None
    assert queue.oldest_s() == 0.0
    queue.finish(slow[0])
    assert await take(queue) == slow[2]


COMPLETE = signals(RunPhase.COMPLETE, step=10)
SECRETS = "/api/v1/namespaces/default/secrets"
CERTIFICATE_END = "vcpo_run_certificate_end_timestamp_seconds"
MADE = {
    "configmaps/demo-config",
    "deployments/demo-rollout-main",
    "networkpolicies/demo",
    "persistentvolumeclaims/demo-learner",
    "poddisruptionbudgets/demo-learner",
    "poddisruptionbudgets/demo-rollout-main",
    "secrets/demo-keys",
    "secrets/demo-tls",
    "serviceaccounts/demo-workload",
    "services/demo-learner",
    "statefulsets/demo-learner",
    "vcporuns/demo",
}


@pytest.fixture
async def operator() -> AsyncIterator[OperatorFixture]:
    async with operator_fixture() as started:
        yield started


async def test_a_run_gets_its_children_and_says_that_it_starts(operator: OperatorFixture):
    await operator.create()
    await operator.settle()
    assert set(await operator.objects()) == MADE
    assert (await operator.condition("Ready"))[:2] == ("False", "Initializing")


async def test_the_end_of_an_earlier_run_of_the_same_name_does_not_end_this_one(
    operator: OperatorFixture,
):
    await operator.create()
    await operator.settle()
    operator.connections.signals = COMPLETE.at_age(1.0)
    await operator.settle()
    assert (await operator.condition("Complete"))[:2] == ("False", "NotFinished")
    operator.now_s += 60.0
    await operator.settle()
    assert (await operator.condition("Complete"))[:2] == ("True", "Succeeded")


async def test_a_complete_run_is_recorded_before_it_is_cleaned_up_and_deleted_in_its_time(
    operator: OperatorFixture,
):
    await operator.create(ttlSecondsAfterFinished=60)
    await operator.settle()
    operator.connections.signals = COMPLETE
    await operator.reconcile()
    assert (await operator.condition("Complete"))[:2] == ("True", "Succeeded")
    assert "statefulsets/demo-learner" in await operator.objects()
    await operator.settle()
    assert "statefulsets/demo-learner" not in await operator.objects()
    operator.now_s += 60.0
    await operator.reconcile()
    assert set(await operator.objects()) == {"persistentvolumeclaims/demo-learner"}
    await operator.reconcile()
    assert operator.exported("vcpo_run_info") == {}


async def test_a_spec_that_cannot_be_used_is_named_and_seen_in_the_conditions(
    operator: OperatorFixture,
):
    await operator.create(environment={"name": "sort_digits", "parameters": {"digit": 5}})
    await operator.reconcile()
    status, reason, message = await operator.condition("Accepted")
    assert (status, reason) == ("False", "InvalidSpec")
    assert "spec.environment.parameters.digit: 'sort_digits' has no such" in message
    assert set(await operator.objects()) == {"vcporuns/demo"}
    assert operator.exported("vcpo_run_condition_reason") == {
        ("Accepted", "InvalidSpec"): 1.0,
        ("Ready", "InvalidSpec"): 1.0,
    }


async def test_a_field_of_a_newer_definition_is_left_out_and_told_while_the_run_goes_on(
    operator: OperatorFixture,
):
    newer = run_definition()
    spec = newer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for section in (spec, spec["properties"]["rollouts"]["items"]):
        section["properties"]["colour"] = {"type": "string", "default": "red"}
    await operator.client.merge_patch(f"{DEFINITIONS}/{newer['metadata']['name']}", newer)
    await operator.create()
    await operator.settle()
    assert (await operator.run())["spec"]["colour"] == "red"
    status, _, message = await operator.condition("Accepted")
    assert status == "True"
    assert "left out: `spec.rollouts.0.colour`, `spec.colour`; upgrade the operator" in message
    assert set(await operator.objects()) == MADE


async def test_a_run_that_collapsed_says_so_in_its_conditions_events_and_log(
    operator: OperatorFixture, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", logger="vcpo_operator")
    await operator.create()
    await operator.settle()
    operator.connections.signals = replace(COMPLETE, collapse="It fell.")
    await operator.settle()
    for kind, status in (("Complete", "True"), ("Ready", "True"), ("Stable", "False")):
        told = (status, "Collapsed", "All 10 steps are taken. It fell.")
        assert await operator.condition(kind) == told
    events = [(each["reason"], each["type"]) for each in await operator.events()]
    assert ("Collapsed", "Warning") in events
    logged = [
        (record.event, "Warning" if record.levelname == "WARNING" else "Normal")
        for record in caplog.records
        if hasattr(record, "event")
    ]
    assert sorted(logged) == sorted(events)


async def test_a_throttle_is_counted_and_the_limit_is_exported(operator: OperatorFixture):
    await operator.create()
    await operator.settle()
    operator.connections.signals = signals(ess_ratio_mean=0.01, step=51)
    await operator.reconcile()
    assert operator.exported("vcpo_run_max_policy_lag_steps") == {(): 8.0}
    assert operator.exported("vcpo_run_admission_lag_steps") == {(): 4.0}
    assert operator.exported("vcpo_run_throttles_total")["tighten",] == 1.0
    assert ("EssHealthy", "BelowFloor") in operator.exported("vcpo_run_condition_reason")


async def test_the_deadline_of_the_start_goes_with_the_first_step(operator: OperatorFixture):
    await operator.create(startupDeadlineSeconds=600)
    started_s, name = operator.now_s, "vcpo_run_startup_deadline_timestamp_seconds"
    await operator.settle()
    assert operator.exported(name) == {}
    for pod in await operator.pods():
        await operator.schedule(pod)
    await operator.settle()
    assert operator.exported(name) == {(): started_s + 600.0}
    assert operator.exported("vcpo_run_start_timestamp_seconds") == {(): started_s}
    operator.now_s += 60.0
    operator.connections.signals = signals(step=1).at_age(2.0)
    await operator.settle()
    assert operator.exported(name) == {}
    assert operator.exported("vcpo_run_signals_age_seconds") == {(): 2.0}


async def test_the_end_of_the_first_certificate_is_exported_also_of_a_secret_of_the_users(
    operator: OperatorFixture,
):
    await operator.create()
    await operator.settle()
    made = secret_data(await operator.client.get(f"{SECRETS}/demo-tls"))
    assert operator.exported(CERTIFICATE_END) == {(): first_end_s(made, ["learner", "rollout"])}
    mine = renewed_certificates(made, {"tls": ["learner"]}, now_s=0.0)
    data = {key: base64.b64encode(each).decode() for key, each in mine.items()}
    await operator.client.create(SECRETS, {"metadata": {"name": "mine"}, "data": data})
    await operator.edit(pods={"tlsSecretName": "mine"})
    operator.now_s += 60.0
    await operator.settle()
    assert operator.exported(CERTIFICATE_END) == {(): 90 * 86_400.0}


async def test_a_deleted_run_leaves_no_series(operator: OperatorFixture):
    await operator.create()
    await operator.settle()
    await operator.client.delete(RUN)
    await operator.reconcile()
    samples = [each for one in operator.metrics.registry.collect() for each in one.samples]
    assert not [each for each in samples if each.labels.get("run") == KEY.name]
