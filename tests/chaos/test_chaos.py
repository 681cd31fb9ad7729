"""Each check of the harness can fail, and a short run passes."""

import base64
import json
import os
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.chaos.answers import Damage
from tests.chaos.drops import Terms
from tests.chaos.fault import schedule
from tests.chaos.harness import shortfalls
from tests.chaos.kinds import SHORT, Kind
from tests.chaos.labels import LabelCheck
from tests.chaos.live_run import MODEL, ROOT
from tests.chaos.recorder import digest_of_message
from tests.chaos.recorder import judge as judge_on_terms
from vcpo.wire.v1 import work_pb2

TERMS = Terms(max_policy_lag_steps=4, prompts_per_step=8, group_size=4, lease_timeout_s=10.0)
FIRST, SECOND = "train-1f-0/0", "train-1f-0/1"
PASSED = {
    **dict.fromkeys(("lost", "double_trained", "mislabelled", "hangs", "silent", "orphans"), 0),
    **dict.fromkeys(("wrongly_dropped", "wrong_steps", "wrong_records", "unexpected_ends"), 0),
    **dict.fromkeys(("confirmed", "trained", "weights", "labels_checked", "steps_checked"), 2),
    "faults": 300,
    "kinds": 25,
}


def message(name, *, version=0, logprob=-1.0):
    return work_pb2.Trajectory(
        trajectory_id=name,
        prompt_token_ids=struct.pack("<I", 3),
        response_token_ids=struct.pack("<I", 4),
        rollout_logprobs=struct.pack("<f", logprob),
        version_spans=[work_pb2.VersionSpan(policy_version=version, num_tokens=1)],
        reward=1.0,
    )


def said(*names, unix_s=1.0, **fields):
    """What a worker says that has submitted responses and was told that they are accepted."""
    sent = [
        {
            "what": "submitted",
            "id": name,
            "message": base64.b64encode(message(name, **fields).SerializeToString()).decode(),
        }
        for name in names
    ]
    return [*sent, {"what": "confirmed", "ids": list(names), "unix_s": unix_s}]


def trained(step, *names, **fields):
    content = [(name, digest_of_message(message(name, **fields))) for name in names]
    return {"what": "trained", "version": step, "content": content}


def published(version, digest="d"):
    return {"what": "published", "version": version, "digest": digest}


def resumed(step, *names, unix_s=2.0):
    return {"what": "resumed", "step": step, "ids": list(names), "unix_s": unix_s}


def ended(*names):
    return {"what": "ended", "ids": list(names)}


def damage(*, kind=Kind.LOG_DAMAGED, told_changes):
    return Damage(kind=kind, at_unix_s=10.0, told_changes=told_changes)


def late(name):
    """A drop of a group of version 0 whose turn comes at version 5, with a limit of 4."""
    return {
        "what": "dropped",
        "groups": [[name]],
        "reason": "lag_exceeded",
        "step": 5,
        "buffered": [[name]],
        "monotonic_s": 1.0,
    }


def judge(lives, workers, **options):
    verdict = judge_on_terms(lives, workers, terms=TERMS, **options)
    assert verdict.wrongly_dropped == []
    return verdict


def faults_of(verdict):
    return verdict.lost, verdict.double_trained, verdict.mislabelled


def test_a_run_that_trained_on_dropped_or_holds_all_that_it_confirmed_passes():
    third = "train-1f-1/0"
    learner = [published(0), trained(0, FIRST), late(SECOND), ended(third)]
    verdict = judge([learner], [said(FIRST, SECOND, third)])
    assert faults_of(verdict) == ([], [], [])
    assert (verdict.num_confirmed, verdict.num_trained, verdict.num_waiting) == (3, 1, 1)
    assert verdict.dropped == {"lag_exceeded": 1}


def test_a_response_that_was_confirmed_and_is_nowhere_is_lost():
    verdict = judge([[published(0), trained(0, FIRST), ended()]], [said(FIRST, SECOND)])
    assert faults_of(verdict) == ([SECOND], [], [])


def test_a_step_of_a_dead_learner_does_not_stand_and_what_it_trained_on_is_lost():
    lives = [[published(0), trained(0, FIRST)], [resumed(0), trained(0, SECOND), ended()]]
    assert faults_of(judge(lives, [said(FIRST, SECOND)])) == ([FIRST], [], [])


def test_a_drop_that_a_crash_took_back_excuses_no_later_loss():
    lives = [[published(0), late(FIRST)], [resumed(0, FIRST), ended()]]
    assert faults_of(judge(lives, [said(FIRST)])) == ([FIRST], [], [])


def test_a_drop_that_is_redone_is_judged_by_the_time_of_its_decision():
    """The learner died in the step after it, so the next one is a version behind."""
    redone = {**late(FIRST), "step": 4}
    lives = [[published(0), late(FIRST)], [redone, resumed(4), ended()]]
    assert faults_of(judge(lives, [said(FIRST)])) == ([], [], [])


@pytest.mark.parametrize(
    "steps",
    [[trained(0, FIRST), trained(1, FIRST)], [trained(0, FIRST, FIRST)]],
    ids=["two steps", "one batch"],
)
def test_a_response_that_stands_twice_is_trained_on_twice(steps):
    learner = [published(0), published(1), *steps, ended()]
    assert faults_of(judge([learner], [said(FIRST)])) == ([], [FIRST], [])


def test_a_step_that_is_taken_again_after_a_crash_counts_once():
    lives = [[published(0), trained(0, FIRST)], [resumed(0, FIRST), trained(0, FIRST), ended()]]
    assert faults_of(judge(lives, [said(FIRST)])) == ([], [], [])


@pytest.mark.parametrize("other", [{"version": 1}, {"logprob": -2.0}], ids=["label", "content"])
def test_a_response_that_is_trained_on_otherwise_than_it_was_sent_is_mislabelled(other):
    learner = [published(0), published(1), trained(0, FIRST, **other), ended()]
    assert faults_of(judge([learner], [said(FIRST)])) == ([], [], [FIRST])


def test_a_response_that_no_worker_sent_is_mislabelled():
    assert faults_of(judge([[trained(0, FIRST), ended()]], [])) == ([], [], [FIRST])


def test_a_label_of_a_version_that_was_never_published_is_mislabelled():
    learner = [published(0), trained(0, FIRST, version=7), ended()]
    assert faults_of(judge([learner], [said(FIRST, version=7)])) == ([], [], [FIRST])


def test_weights_that_no_learner_published_under_their_number_are_mislabelled():
    worker = [{"what": "swapped", "version": 0, "digest": "other"}]
    assert faults_of(judge([[published(0), ended()]], [worker])) == ([], [], ["version 0"])


def test_two_sets_of_weights_under_one_number_are_mislabelled():
    lives = [[published(0)], [published(0, "other"), resumed(0), ended()]]
    assert faults_of(judge(lives, [])) == ([], [], ["version 0"])


def test_what_a_damaged_disk_lost_is_excused_and_nothing_that_was_confirmed_later():
    lives = [[published(0)], [resumed(0, unix_s=20.0), ended()]]
    workers = [said(FIRST, unix_s=5.0), said(SECOND, unix_s=30.0)]
    verdict = judge(lives, workers, damages=[damage(told_changes=1)])
    assert (verdict.lost, verdict.num_lost_with_disk) == ([SECOND], 1)


@pytest.mark.parametrize(
    "unexcused",
    [damage(told_changes=0), damage(kind=Kind.JOURNAL_TORN, told_changes=1)],
    ids=["without a word of the learner", "by a fault that may lose nothing"],
)
def test_what_a_damaged_disk_lost_without_an_excuse_is_lost(unexcused):
    lives = [[published(0)], [resumed(0, unix_s=20.0), ended()]]
    workers = [said(FIRST, unix_s=5.0)]
    assert judge(lives, workers, damages=[unexcused]).lost == [FIRST]


def test_a_learner_that_tells_of_too_little_has_lost_the_rest():
    """One change has four responses at most, and five are gone."""
    lives = [[published(0)], [resumed(0, unix_s=20.0), ended()]]
    five = [f"train-1f-{number}/0" for number in range(5)]
    told = [damage(told_changes=1)]
    assert judge(lives, [said(*five, unix_s=5.0)], damages=told).lost == five


def test_a_token_under_other_weights_than_those_of_its_label_is_found(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    right = {name: one.detach().clone() for name, one in model.named_parameters()}
    torch.manual_seed(0)
    moved = {name: one + 1e-2 * torch.randn_like(one).sign() for name, one in right.items()}
    save_file(right, tmp_path / "0-a.safetensors")
    save_file(moved, tmp_path / "1-b.safetensors")
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([[3, 4]])).logits[0, 0], dim=-1)
    labels, logprob = LabelCheck(MODEL, tmp_path), float(logprobs[4])
    assert labels.wrong_labels([message(FIRST, version=0, logprob=logprob)]) == []
    assert labels.wrong_labels([message(FIRST, version=1, logprob=logprob)]) == [FIRST]
    assert labels.num_checked == 1


def test_a_seed_gives_one_schedule_with_every_kind_in_it():
    faults = schedule(7, 100)
    assert faults == schedule(7, 100)
    assert faults != schedule(8, 100)
    assert {fault.kind for fault in faults} == set(Kind)
    assert [fault.number for fault in faults] == list(range(1, 101))
    assert {fault.kind for fault in schedule(1, 100, SHORT)} == SHORT


@pytest.mark.parametrize("name", sorted(PASSED))
def test_each_bar_can_be_missed(name):
    assert shortfalls(PASSED, faults=300, kinds=25) == []
    worse = 1 if PASSED[name] == 0 else PASSED[name] - 1
    (missed,) = shortfalls({**PASSED, name: worse}, faults=300, kinds=25)
    assert missed.startswith(f"{name} is ")


def test_a_short_run_keeps_every_bar():
    command = [sys.executable, "-m", "tests.chaos", "--short", f"--faults={len(SHORT)}"]
    ended = subprocess.run(
        [*command, "--seed=1", "--minutes=20"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["faults"] == result["kinds"] == len(SHORT)
