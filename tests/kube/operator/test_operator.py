"""What the API server refuses, and what belongs to others, is reported once and left alone."""

import asyncio
import dataclasses
import math
from collections import Counter
from dataclasses import replace

import pytest

from tests.fakes.kubernetes.errors import forbidden
from tests.fakes.kubernetes.faults import Effect, Fault, broken
from tests.fixtures.operator.operator import (
    DEFAULTS,
    LAST_LINES,
    ON_THE_FAKE,
    PODS,
    RUN,
    RUNS,
    USER_AGENT,
    operator_fixture,
    run_body,
    signals,
    whole_operator,
)
from vcpo.wire.phase import RunPhase
from vcpo_operator.decisions.status import PROGRESS_PERIOD_S
from vcpo_operator.reconcile.memory import REFUSED_S


async def test_a_learner_that_is_evicted_says_who_evicts_it_and_its_run_does_not_fail(operator):
    await operator.train()
    operator.connections.signals = None
    await operator.schedule("demo-learner-0")
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction"}
    eviction |= {"metadata": {"name": "demo-learner-0"}}
    await operator.client.create(f"{PODS}/demo-learner-0/eviction", eviction)
    await operator.settle()
    told = ("False", "EvictionByEvictionAPI", "pod demo-learner-0: Eviction API: evicting")
    assert await operator.condition("LearnerReady") == told
    run = (await operator.run())["status"]
    assert (run["reason"], run["learner"]["restarts"]) == ("EvictionByEvictionAPI", 0)
    told_of = {each["reason"]: each["type"] for each in await operator.events()}
    assert told_of["EvictionByEvictionAPI"] == "Normal"
    assert (await operator.condition("Failed"))[0] == "False"


PATIENCE_S = 30.0
POLL_S = 0.05


async def until(condition):
    """Ask until the answer is yes; a real server has no other sign for all that a test may want."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(POLL_S)


async def generation_is_seen(operator, generation):
    """Wait until the run's status speaks of this generation."""

    async def is_seen():
        status = (await operator.run()).get("status") or {}
        return status.get("observedGeneration", 0) == generation

    await until(is_seen)


@ON_THE_FAKE
async def test_a_change_after_an_interrupted_watch_is_seen(operator):
    await operator.create()
    async with whole_operator(operator):
        await generation_is_seen(operator, 1)
        operator.server.watches.close_all()
        await operator.edit(suspend=True)
        await generation_is_seen(operator, 2)


@ON_THE_FAKE
async def test_a_change_after_a_forgotten_history_is_seen(operator):
    await operator.create()
    async with whole_operator(operator):
        await generation_is_seen(operator, 1)
        operator.server.watches.close_all()
        await operator.edit(suspend=True)
        operator.server.compact()
        await generation_is_seen(operator, 2)


NUM_ROUNDS = 20
GROUP = {"name": "main", "minReplicas": 1, "maxReplicas": 4}


async def test_a_run_that_does_not_change_costs_no_write(operator):
    await operator.create(rollouts=[GROUP])
    operator.connections.signals = signals()
    await operator.settle_with_progress()
    before = await operator.backend.revision()
    for _ in range(NUM_ROUNDS):
        operator.now_s += 36.0
        await operator.reconcile()
    assert await operator.backend.revision() == before


SIGNALS_MAX_AGE_S = 60


async def train(operator):
    """Bring the run to where it trains."""
    await operator.train()
    assert await condition(operator, "Ready") == ("True", "Training")


async def condition(operator, kind):
    """Status and reason of a condition of the run."""
    return (await operator.condition(kind))[:2]


async def events_of_the_run(operator):
    """Names of the events about the run."""
    return {each["metadata"]["name"] for each in await operator.events()}


FAILING = {"failures_in_a_row": 1000, "generation_failure": "It has no tokenizer."}
UNCHANGED = {"skipped": "low_ess", "skipped_steps": 12}


@pytest.mark.parametrize(
    ("said", "ready"),
    [(FAILING, ("False", "GenerationFailing")), (UNCHANGED, ("True", "NoUpdate"))],
)
async def test_what_the_learner_said_of_its_work_stands_until_a_fresh_operator_hears_it(
    operator, said, ready
):
    await train(operator)
    operator.connections.signals = heard = signals(**said)
    await operator.settle()
    assert await condition(operator, "Ready") == ready
    before, told = (await operator.run())["status"]["conditions"], await events_of_the_run(operator)
    operator.restart_operator()
    for says in (None, None, heard):
        operator.connections.signals = says
        await operator.reconcile()
        assert (await operator.run())["status"]["conditions"] == before
        operator.now_s += 1.0
    assert await events_of_the_run(operator) == told


async def test_a_learner_that_a_fresh_operator_never_reaches_is_reported_in_the_end(operator):
    await train(operator)
    operator.restart_operator()
    operator.connections.signals = None
    await operator.reconcile()
    operator.now_s += SIGNALS_MAX_AGE_S + 1.0
    await operator.settle()
    assert await condition(operator, "SignalsFresh") == ("False", "Missing")
    assert await condition(operator, "Ready") == ("False", "Degraded")


CONFIG = "/api/v1/namespaces/default/configmaps/demo-config"
UPGRADED = dataclasses.replace(DEFAULTS, learner_image="learner:2", scrape_annotations=False)


async def uids(operator):
    return {each["metadata"]["uid"] for each in (await operator.pods()).values()}


async def images(operator):
    pods = (await operator.pods()).values()
    return {each["spec"]["containers"][0]["image"] for each in pods}


async def test_an_upgraded_operator_replaces_no_pod_scales_them_and_says_what_waits(operator):
    await operator.train()
    before, file = await uids(operator), (await operator.client.get(CONFIG))["data"]
    operator.restart_operator(UPGRADED)
    await operator.settle()
    assert await uids(operator) == before
    assert (await operator.client.get(CONFIG))["data"] == file
    status, reason, message = await operator.condition("UpToDate")
    assert (status, reason) == ("False", "RevisionPending")
    assert "`upgradePolicy` 'OnRestart'" in message
    operator.now_s += 60.0
    operator.connections.signals = signals(learner_idle_ratio=0.6, ready_workers={"main": 1})
    await operator.settle()
    assert before < await uids(operator)
    assert await images(operator) == {"learner:1", "rollout:1"}


CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
CLAIM = "/api/v1/namespaces/default/persistentvolumeclaims/demo-learner"
SENTENCE = 'spec.template.spec.containers[0].volumeMounts[3].name: Not found: "absent"'
MOUNT = {"name": "absent", "mountPath": "/data"}
THEIRS = {"metadata": {"name": "demo-config"}, "data": {"ours": "keep"}}


def template(container, mounts):
    """A user's part of a pod template."""
    return {"spec": {"containers": [{"name": container, "volumeMounts": mounts}]}}


def group(mounts):
    """The run's group with mounts in its template."""
    return {**run_body()["spec"]["rollouts"][0], "template": template("rollout", mounts)}


async def test_a_template_that_the_server_refuses_is_not_accepted_and_warned_of_once(operator):
    await operator.create(rollouts=[group([MOUNT])])
    await operator.settle()
    status, reason, message = await operator.condition("Accepted")
    assert (status, reason) == ("False", "InvalidSpec")
    assert SENTENCE in message
    assert await operator.condition("Ready") == ("False", "InvalidSpec", message)
    operator.restart_operator()
    await operator.settle()
    told = [each["message"] for each in await operator.events() if each["reason"] == reason]
    assert told == [f"Accepted: {message}"]


STATES = ("complete", "suspended", "pending")


async def reconcile_due(operator, due):
    """Reconcile each run whose time has come, at a fresh view."""
    await operator.backend.refresh()
    for key in [key for key, at_s in due.items() if at_s <= operator.now_s]:
        is_complete = key.name.startswith("complete")
        operator.connections.signals = signals(RunPhase.COMPLETE, step=10) if is_complete else None
        wait_s = (await operator.reconciler.reconcile(key)).requeue_after_s
        due[key] = math.inf if wait_s is None else operator.now_s + wait_s
    await operator.backend.wait_until_settled()


@ON_THE_FAKE
async def test_of_60_runs_at_rest_each_costs_a_read_a_minute_at_most_and_a_complete_one_none(
    operator,
):
    keys = [operator.key_of(f"{state}-{number}") for number in range(10, 30) for state in STATES]
    for key in keys:
        body = run_body(key.name, suspend=key.name.startswith("suspended"))
        await operator.client.create(RUNS, body)
    for _ in range(4):
        operator.now_s += PROGRESS_PERIOD_S
        await reconcile_due(operator, dict.fromkeys(keys, 0.0))
    runs = (await operator.client.get(RUNS))["items"]
    shown = Counter((run["metadata"]["name"][:-3], run["status"]["reason"]) for run in runs)
    assert shown == {
        ("complete", "Complete"): 20,
        ("suspended", "Suspended"): 20,
        ("pending", "Initializing"): 20,
    }
    assert [each for each in operator.server.recorder if each.user_agent == USER_AGENT]
    operator.server.recorder.clear()
    due, start_s = dict.fromkeys(keys, 0.0), operator.now_s
    while operator.now_s < start_s + 120.0:
        await reconcile_due(operator, due)
        operator.now_s += 15.0
    calls = [each for each in operator.server.recorder if each.user_agent == USER_AGENT]
    assert {each.verb for each in calls} <= {"get"}
    reads = Counter(key.name for key in keys for each in calls if each.name.startswith(key.name))
    assert not [name for name in reads if name.startswith("complete")]
    assert max(reads.values(), default=0) <= 2


@ON_THE_FAKE
async def test_what_was_refused_is_tried_again_every_few_minutes_only(operator):
    await operator.create(rollouts=[group([MOUNT])])
    await operator.settle()
    start_s = operator.now_s
    while operator.now_s < start_s + 2 * REFUSED_S:
        operator.now_s += 10.0
        await operator.reconcile()
    writes = operator.server.recorder.writes()
    asked = [each for each in writes if each.user_agent == USER_AGENT]
    assert len([each for each in asked if each.resource == "deployments"]) == 3


async def test_an_object_that_is_nobodys_is_left_as_it_is_until_its_owner_gives_it(operator):
    before = await operator.client.create(CONFIG_MAPS, THEIRS)
    await operator.create()
    await operator.settle()
    status, reason, message = await operator.condition("Ready")
    assert (status, reason) == ("False", "NameTaken")
    assert "kubectl annotate configmap demo-config vcpo.dev/adopt=true" in message
    assert await operator.client.get(f"{CONFIG_MAPS}/demo-config") == before
    assert await operator.pods() == {}
    given = {"metadata": {"annotations": {"vcpo.dev/adopt": "true"}}}
    await operator.client.merge_patch(f"{CONFIG_MAPS}/demo-config", given)
    await operator.settle()
    taken, run = await operator.client.get(f"{CONFIG_MAPS}/demo-config"), await operator.run()
    owners = [each["uid"] for each in taken["metadata"]["ownerReferences"]]
    assert owners == [run["metadata"]["uid"]]
    assert {"run.yaml", "ours"} <= set(taken["data"])
    assert (await operator.condition("Ready"))[1] == "Initializing"


@ON_THE_FAKE
async def test_a_growth_that_the_storage_class_forbids_holds_up_nothing_else(operator):
    why = "only dynamically provisioned pvc can be resized"
    error = forbidden("persistentvolumeclaims", "demo-learner", why)
    claims = "persistentvolumeclaims"
    await operator.create(learner={"checkpointStorageGibibytes": 10})
    await operator.settle()
    await operator.client.merge_patch(f"{CLAIM}/status", {"status": {"phase": "Bound"}})
    await operator.settle()
    operator.connections.signals = signals()
    await operator.settle()
    operator.server.faults.add(
        Fault(error=error, verb="patch", resource=claims, user_agent=USER_AGENT, times=None)
    )
    two = [{"name": "main", "minReplicas": 2, "maxReplicas": 3}]
    await operator.edit(learner={"checkpointStorageGibibytes": 50}, rollouts=two)
    assert not (await operator.reconcile()).error
    assert await operator.replicas() == 2
    status, reason, message = await operator.condition("Accepted")
    assert (status, reason) == ("False", "InvalidSpec")
    assert why in message
    await operator.edit(learner={"checkpointStorageGibibytes": 10})
    assert not (await operator.reconcile()).error
    assert (await operator.condition("Accepted"))[:2] == ("True", "Accepted")


DRAIN_S = 90
LEARNER = "/apis/apps/v1/namespaces/default/statefulsets/demo-learner"


def deliver(operator):
    """Let what is under way come in."""
    operator.connections.signals = replace(operator.connections.signals, in_flight=0)


async def at_work(operator):
    """Replicas of the learner and of its workers."""
    learner = await operator.client.get(LEARNER)
    return learner["spec"]["replicas"], await operator.replicas()


@ON_THE_FAKE
async def test_a_run_that_is_deleted_is_drained_once_while_it_is_still_there(operator):
    await operator.train()
    await operator.client.merge_patch(RUN, {"metadata": {"finalizers": ["test.dev/slow"]}})
    await operator.client.delete(RUN)
    await operator.reconcile()
    await operator.reconcile()
    assert operator.connections.drains == ["the run is deleted"]


async def suspend_and_drain(held, now_s, fault=None):
    """Number of the operator's calls from suspension to the end, and the objects left."""
    async with operator_fixture(held=held.copy()) as operator:
        operator.now_s, operator.connections.signals = now_s, signals()
        if fault is not None:
            operator.server.faults.add(fault)
        operator.connections.in_flight_after_drain = 3
        await operator.edit(suspend=True)
        await operator.settle()
        assert await at_work(operator) == (1, 1)
        deliver(operator)
        await operator.settle_with_progress()
        assert "the run is suspended" in operator.connections.drains
        calls = [each for each in operator.server.recorder if each.user_agent == USER_AGENT]
        return len(calls), await operator.objects()


async def test_an_operator_killed_at_any_call_while_it_drains_still_reaches_the_same_end():
    async with operator_fixture() as operator:
        await operator.train(learner={"drainSeconds": DRAIN_S})
        held, now_s = operator.server.api.copy(), operator.now_s
    num_calls, state = await suspend_and_drain(held, now_s)
    assert num_calls >= 5
    for position in range(num_calls):
        fault = Fault(effect=Effect.LOSE_REPLY, after=position, times=1, user_agent=USER_AGENT)
        found = await suspend_and_drain(held, now_s, fault)
        assert found[1] == state, f"killed at call {position}"


async def test_a_run_whose_learner_crashes_frees_all_and_keeps_its_last_lines(operator):
    await operator.create()
    await operator.settle()
    await operator.crash_learner(times=4)
    await operator.settle()
    status, reason, message = await operator.condition("Failed")
    assert (status, reason) == ("True", "BackoffLimitExceeded")
    assert message == (
        "`spec.failurePolicy.maxLearnerRestarts`: the learner ended 4 times in a row without"
        " progress; 3 restarts are allowed. The last time it ended with exit code 1 (Error):"
        " torch.OutOfMemoryError: CUDA out of memory."
    )
    assert set(await operator.objects()) <= {
        "vcporuns/demo",
        "persistentvolumeclaims/demo-learner",
        "secrets/demo-keys",
        "secrets/demo-tls",
    }
    operator.restart_operator()
    operator.now_s += 3600.0
    await operator.settle()
    assert await operator.condition("Failed") == (status, reason, message)
    assert (await operator.run())["status"]["learner"]["lastTermination"] == {
        "pod": "demo-learner-0",
        "exitCode": 1,
        "reason": "Error",
        "message": LAST_LINES,
        "finishedTime": "2026-11-20T10:00:05Z",
    }


@ON_THE_FAKE
async def test_trouble_that_holds_up_a_new_attempt_is_reported_beside_the_old_failure(operator):
    await operator.create()
    await operator.settle()
    await operator.crash_learner(times=4)
    await operator.settle()
    failed = await operator.condition("Failed")
    generation = (await operator.run())["status"]["observedGeneration"]
    fault = Fault(error=broken(), verb="patch", resource="services", times=None)
    operator.server.faults.add(fault)
    await operator.edit(steps=20)
    assert (await operator.reconcile()).error
    assert await operator.condition("Failed") == failed
    assert (await operator.run())["status"]["observedGeneration"] == generation
    status, reason, message = await operator.condition("Ready")
    assert (status, reason) == ("False", "ApplyFailed")
    assert "scripted" in message
    await operator.settle()
    assert (await operator.condition("Failed"))[:2] == ("False", "NotFailed")
    assert "demo-learner-0" in await operator.pods()
