from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fixtures.learner.dispatcher import ManualClock, make_run
from tests.fixtures.learner.options import options
from vcpo.api.learner import ActivationCheckpointing
from vcpo.service.lifecycle import DRAINED, StartError
from vcpo.service.run_lock import LockHolder, run_lock
from vcpo.wire.phase import RunPhase
from vcpo_learner import __main__ as command
from vcpo_learner import app
from vcpo_learner.device import computes, free_bytes, let_segments_grow
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.ranks.environment import RankEnvironment
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.troubles import Answer, Trouble, Troubles

LENGTHS = [5, 3, 4, 2]


def the_pages_step(model, optimizer):
    page = Path("docs/library.md").read_text()
    code = re.search(r"one backward pass each:\n\n```python\n(.*?)```", page, re.DOTALL)[1]
    names = {"model": model, "optimizer": optimizer}
    exec(code, names)
    return names["step"]


@pytest.mark.parametrize("checkpoints", list(ActivationCheckpointing))
def test_its_gradient_is_that_of_one_backward_pass_a_trajectory(checkpoints):
    model = AutoModelForCausalLM.from_pretrained("examples/models/tiny")
    model.train()
    tokens = torch.randint(3, 12, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).float()
    logprobs = model(tokens).logits[:, :-1].log_softmax(-1)
    chosen = logprobs.gather(2, tokens[:, 1:, None])[..., 0]
    rewards = torch.tensor([[1.0, 0.0], [0.25, 0.5]])

    # On policy all weights are 1, and A = R - b* with b* = sum(n R) / sum(n) over the batch.
    terms = (chosen * mask).sum(1) / mask.sum(1)
    each = [torch.autograd.grad(term, model.parameters(), retain_graph=True) for term in terms]
    norms = torch.stack([sum(part.square().sum() for part in one) for one in each])
    advantages = rewards.flatten() - (norms * rewards.flatten()).sum() / norms.sum()
    set_checkpoints(model, checkpoints)
    step = the_pages_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    report = step(tokens, mask, chosen.detach(), rewards, torch.zeros(4))
    assert report.ess_ratio == pytest.approx(1.0)
    assert 0.0 < report.rate < 0.1
    for parameter, parts in zip(model.parameters(), zip(*each, strict=True), strict=True):
        wanted = -sum(a * part for a, part in zip(advantages, parts, strict=True)) / 4
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-6)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def told():
    return []


@pytest.fixture
def troubles(clock, told):
    policy = {"maxFailuresInARow": 4, "failureToleranceSeconds": 60}
    spec = make_run(failurePolicy=policy).spec
    return Troubles(spec, clock, lambda *event: told.append(event))


def test_a_row_is_answered_when_it_is_long_enough_and_has_lasted(troubles, clock):
    answers = [troubles.report(Trouble.GENERATION) for _ in range(4)]
    assert answers == [Answer.RETRY] * 4
    assert troubles.answer(Trouble.GENERATION, at_once=True) is Answer.END
    clock.advance(60.0)
    assert troubles.answer(Trouble.GENERATION) is Answer.END
    troubles.end_row(Trouble.GENERATION)
    assert troubles.report(Trouble.GENERATION) is Answer.RETRY


def test_each_worker_has_a_row_of_its_own(troubles):
    answers = [troubles.report(Trouble.WORKER, who=who) for who in ("a", "b", "a")]
    assert answers == [Answer.RETRY, Answer.RETRY, Answer.SET_ASIDE]


def test_of_equal_troubles_the_first_three_the_tenth_and_the_hundredth_are_told(troubles, told):
    for _ in range(120):
        troubles.report(Trouble.WRITE, "no room")
    assert told == [
        *[("DiskFull", "no room")] * 3,
        ("DiskFull", "no room; 10 times so far"),
        ("DiskFull", "no room; 100 times so far"),
    ]


def test_troubles_without_end_that_all_differ_are_told_a_bounded_number_of_times(troubles, told):
    for number in range(10_000):
        troubles.report(Trouble.GENERATION, f"item {number}", like=number)
    assert len(told) < 300


CPU = torch.device("cpu")
GIB = 1 << 30
GPU = torch.device("cuda", 0)


def test_a_device_computes_until_pytorch_raises_an_error(monkeypatch):
    assert computes(CPU)

    def ones_on_a_broken_gpu(*_shape, **_options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "ones", ones_on_a_broken_gpu)
    assert not computes(CPU)


def test_segments_of_a_gpu_grow_unless_the_user_has_set_up_the_allocator():
    environment: dict[str, str] = {}
    let_segments_grow(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment = {name: "backend:cudaMallocAsync"}
        let_segments_grow(environment)
        assert environment == {name: "backend:cudaMallocAsync"}


@pytest.fixture
def card(monkeypatch):
    """A card of 80 GiB: 70 are free; the process has reserved 6 and allocated 4."""

    def with_share(share):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 6 * GIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 4 * GIB)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: share)

    return with_share


def test_a_process_alone_on_its_gpu_has_what_the_gpu_has(card):
    card(share=1.0)
    assert free_bytes(GPU) == 72 * GIB  # 70 free, and 2 of its own without a tensor


def test_a_process_that_shares_its_gpu_has_what_its_share_leaves(card):
    card(share=0.5)
    assert free_bytes(GPU) == 36 * GIB  # half of 80, of which it has 4


async def test_a_learner_leaves_a_directory_alone_that_another_one_trains_in(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "_LOCK_PATIENCE_S", 0.0)
    with (
        run_lock(tmp_path, LockHolder.LEARNER),
        pytest.raises(StartError, match=r"another learner \(process \d+ on .+ works on this run"),
    ):
        await app.run_learner(options(tmp_path, resume=True), RankEnvironment())


async def test_metrics_that_cannot_be_kept_up_to_date_end_no_run(tmp_path, monkeypatch, caplog):
    refreshed = []

    def refresh(gauges: LearnerGauges) -> None:
        refreshed.append(gauges)
        if len(refreshed) == 3:
            gauges._dispatcher.drain()
        raise ValueError("counters go up only")

    monkeypatch.setattr(LearnerGauges, "refresh", refresh)
    monkeypatch.setattr(app, "_REFRESH_S", 0.0)
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "metadata: {name: r}\nspec:\n  model: {name: examples/models/tiny}\n  steps: 1\n"
        "  environment: {name: sort_digits}\n  sampling: {maxNewTokens: 8}\n"
    )
    async with asyncio.timeout(30):
        phase = await app.run_learner(options(tmp_path, run_file=run_file), RankEnvironment())
    assert phase is RunPhase.DRAINING
    assert len(refreshed) >= 3
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert "counters go up only" in logged.exc_text


@pytest.mark.parametrize(
    ("phase", "status"),
    [(RunPhase.COMPLETE, 0), (RunPhase.FAILED, 1), (RunPhase.DRAINING, DRAINED)],
)
def test_the_exit_status_tells_a_complete_run_from_one_that_was_drained(phase, status, monkeypatch):
    async def run(*_: object) -> RunPhase:
        return phase

    monkeypatch.setattr(command, "run_learner", run)
    arguments = ["vcpo_learner", "run.yaml", "--run-dir=r", f"--drained-status={DRAINED}"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command.main() == status
