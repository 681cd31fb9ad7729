"""A step that is not the one that its batch asks for is found."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save_file

from tests.chaos.learner import digest_of
from tests.chaos.live_run import SPEC
from tests.chaos.recorder import write_message
from tests.chaos.steps import TOLERANCE, StepCheck
from tests.chaos.witness import Witness
from vcpo.api import load_run
from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan, trajectory_to_message
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.checkpoints.folder import CheckpointFolder, state_bytes
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer
from vcpo_learner.ranks.environment import RankEnvironment
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks


def responses(model, version):
    """A batch of 8 prompts with 4 responses each, which the model itself might have sampled."""
    draw = random.Random(version)
    made = []
    for group in range(8):
        prompt = [draw.randrange(3, 20) for _ in range(3)]
        for number in range(4):
            tokens = [draw.randrange(3, 20) for _ in range(5)]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, 2:-1]
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens)[:, None])
            made.append(
                Trajectory(
                    trajectory_id=f"train-{version}-{group}/{number}",
                    prompt_token_ids=tuple(prompt),
                    response_token_ids=tuple(tokens),
                    rollout_logprobs=tuple(logprobs[:, 0].tolist()),
                    version_spans=(VersionSpan(policy_version=version, num_tokens=5),),
                    reward=draw.random(),
                    finish_reason=FinishReason.STOP,
                )
            )
    return made


class RecordedRun:
    """A learner that takes two steps in this process, and what is recorded of the second one."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "payloads").mkdir()
        (folder / "run.yaml").write_text(SPEC)
        self.run = load_run(folder / "run.yaml")
        self.policy = PolicyOnRanks.load(self.run.spec, RankEnvironment())
        self.witness = Witness(folder / "learner", folder / "order")
        self.sent = {}

    def take(self, version):
        batch = responses(self.policy.model, version)
        self.sent |= {
            each.trajectory_id: write_message(trajectory_to_message(each)) for each in batch
        }
        groups = [batch[start : start + 4] for start in range(0, 32, 4)]
        self.policy.update.step(groups, policy_version=version)
        content = [(each.trajectory_id, digest_of(each)) for each in batch]
        self.witness.say("trained", version=version, content=content, fresh=[])

    def publish(self, version):
        weights = {name: each.detach() for name, each in self.policy.model.named_parameters()}
        save_file(weights, self.folder / "payloads" / f"{version}-d.safetensors")
        self.witness.say("published", version=version, digest="d")

    def save(self, step):
        folder, update = CheckpointFolder(self.folder / "checkpoints", self.run), self.policy.update
        with folder.writing(step) as partial:
            folder.complete(
                partial,
                step=step,
                tensors=update.save_tensors(partial / "tensors").result(),
                update_state=state_bytes(update.state_dict()),
                ledger=[ledger_pb2.LedgerSnapshot()],
            )


def step_twice(monkeypatch):
    """The optimizer takes each step twice."""
    step = PolicyOptimizer.step

    def twice(self, *rates):
        step(self, *rates)
        step(self, *rates)

    monkeypatch.setattr(PolicyOptimizer, "step", twice)


@pytest.mark.parametrize("is_planted", [False, True], ids=["sound", "steps twice"])
def test_an_optimizer_that_steps_twice_on_each_batch_is_found(is_planted, tmp_path, monkeypatch):
    if is_planted:
        step_twice(monkeypatch)
    recorded = RecordedRun(tmp_path)
    recorded.take(0)
    recorded.publish(1)
    recorded.save(1)
    check = StepCheck(
        tmp_path / "run.yaml", tmp_path / "checkpoints", tmp_path / "payloads", tmp_path / "own"
    )
    check.look([tmp_path / "learner"], recorded.sent.get)
    recorded.take(1)
    recorded.publish(2)
    check.look([tmp_path / "learner"], recorded.sent.get)
    assert check.num_checked == 1
    if is_planted:
        assert check.farthest > 5 * TOLERANCE
        assert len(check.wrong) == 1
    else:
        assert check.farthest < TOLERANCE / 100
        assert check.wrong == []
