"""How many ranks a learner has, what each of them is, and how it ends."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fixtures.learner.dispatcher import ManualClock, make_run
from tests.fixtures.learner.training import options
from tests.fixtures.learner.updates import spec_of
from vcpo.api.learner import ActivationCheckpointing, Learner
from vcpo.service.lifecycle import CANNOT_START, DRAINED, RANK_LOST, StartError
from vcpo.service.logs import END_VARIABLE
from vcpo.service.run_lock import LockHolder, run_lock
from vcpo.wire.phase import RunPhase
from vcpo_learner import app, command
from vcpo_learner.device import computes, free_bytes, let_segments_grow
from vcpo_learner.follower import _own_port
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.ranks.ranks import LostRankError, RankEnvironment
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.training import policy_on_ranks
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks, _set_threads, require_ranks
from vcpo_learner.troubles import TOLERANCE_S, Answer, Trouble, Troubles

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
    spec = make_run(failurePolicy={"maxFailuresInARow": 3}).spec
    return Troubles(spec, clock, lambda *event: told.append(event))


def test_a_row_is_answered_when_it_is_long_enough_and_has_lasted(troubles, clock):
    answers = [troubles.report(Trouble.GENERATION) for _ in range(4)]
    assert answers == [Answer.RETRY] * 4
    assert troubles.answer(Trouble.GENERATION, at_once=True) is Answer.END
    clock.advance(TOLERANCE_S)
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


def test_a_process_has_what_its_gpu_or_its_share_of_it_leaves(card):
    card(share=1.0)
    assert free_bytes(GPU) == 72 * GIB  # 70 free, and 2 of its own without a tensor
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


RANK_1 = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "VCPO_STEERING_KEY": "a key",
}


@pytest.mark.parametrize(
    ("learner", "started", "field", "asked", "command"),
    [
        ({"processes": 2}, 1, "processes", "1 x 2", "--nproc-per-node 2"),
        ({"replicas": 2, "processes": 8}, 8, "processes", "2 x 8", "--nnodes 2 --nproc-per-node 8"),
    ],
)
def test_another_number_of_ranks_than_the_specs_is_refused_with_the_cure(
    learner, started, field, asked, command
):
    with pytest.raises(StartError) as refused:
        require_ranks(Learner.model_validate(learner), RankEnvironment(size=started))
    assert str(refused.value).startswith(f"spec.learner.{field}: {asked} ranks are asked for")
    assert f"torchrun {command} -m vcpo_learner" in str(refused.value)


@pytest.mark.parametrize(
    ("learner", "size", "threads"),
    [
        ({"threads": 3, "processes": 2}, 2, 3),
        ({"processes": 2}, 2, 4),
        ({"processes": 16}, 16, 1),
        ({"replicas": 2, "processes": 2}, 4, 4),
    ],
)
def test_ranks_of_one_machine_share_its_cores(learner, size, threads, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    _set_threads(Learner.model_validate(learner), RankEnvironment(size=size))
    assert chosen == [threads]


@pytest.mark.parametrize(("local_rank", "address"), [(0, "0.0.0.0:7600"), (3, "0.0.0.0:0")])
def test_the_first_rank_of_a_pod_answers_its_probes(local_rank, address):
    environment = RankEnvironment(rank=8 + local_rank, size=16, local_rank=local_rank)
    assert _own_port("0.0.0.0:7600", environment) == address


@pytest.mark.parametrize(
    ("weights_listen", "addresses"),
    [
        ("0.0.0.0:7620", ["0.0.0.0:7620", "0.0.0.0:7621", "0.0.0.0:7622"]),
        ("127.0.0.1:0", ["127.0.0.1:0"] * 3),
        (None, ["0.0.0.0:0"] * 3),
    ],
)
def test_each_rank_of_a_pod_sends_weights_at_a_port_of_its_own(weights_listen, addresses):
    given = options(Path(), listen="0.0.0.0:7600", weights_listen=weights_listen, plain_text=True)
    assert [given._weights_address(number) for number in range(3)] == addresses


@pytest.fixture
def start(monkeypatch):
    """Starts the command line as rank 1; `outcome` is what its work does."""
    monkeypatch.setattr(sys, "argv", ["vcpo_learner", "run.yaml", "--run-dir=r"])
    for name, value in RANK_1.items():
        monkeypatch.setenv(name, value)

    def start(outcome: Exception | None) -> int:
        async def run(*_: object) -> RunPhase:
            if outcome is not None:
                raise outcome
            return RunPhase.COMPLETE

        monkeypatch.setattr(command, "run_learner", pytest.fail)
        monkeypatch.setattr(command, "run_follower", run)
        return command.main()

    return start


@pytest.mark.parametrize(
    ("outcome", "status", "cause"),
    [
        (None, 0, ""),
        (StartError("spec.model.name: none"), CANNOT_START, "spec.model.name: none"),
        (LostRankError("rank 0 is gone"), RANK_LOST, "rank 0 is gone"),
    ],
)
def test_a_follower_tells_its_own_failure_from_that_of_another_rank_and_leaves_the_cause(
    start, outcome, status, cause, tmp_path, monkeypatch
):
    log = tmp_path / "termination-log"  # which the kubelet reads
    log.touch()
    monkeypatch.setenv(END_VARIABLE, str(log))
    assert (start(outcome), log.read_text()) == (status, cause)


def test_a_gpu_without_room_for_the_parameters_is_named_with_the_cure(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And more.")

    monkeypatch.setattr(policy_on_ranks, "load_on_ranks", full)
    with pytest.raises(StartError, match=r"spec\.model\.name: .*2\.00 GiB.*gpusPerReplica"):
        PolicyOnRanks.load(spec_of("vcpo2"), RankEnvironment())
