"""GPU hours and the share of the GPUs' peak, by hand calculation."""

import dataclasses

import pytest

from tests.fixtures.records import STEP
from vcpo.api import parse_run
from vcpo_learner.telemetry.cost import StepCost, peak_flops

SPEC = parse_run("""
metadata: {name: countdown}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 10
  learner: {gpusPerReplica: 2}
  rollouts:
    - {name: wide, engine: vllm, tensorParallelSize: 4}
    - {name: cpu, engine: hf}
""").spec


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_known_for_the_gpus_of_the_table_alone(name, peak):
    assert peak_flops(name) == peak


def cost(**changes):
    values = {"parameters": 10**9, "gpus": 2, "peak_flops": 300e12, "gpus_of_worker": {"wide": 4}}
    return StepCost(**values | changes)


def fields(of=None, before=None, **changes):
    values = {
        "tokens": 100_000,
        "seconds": 10.0,
        "accepted_per_s": 12_000.0,
        "groups": ["wide", "wide", "cpu"],
    }
    return (of or cost()).fields(before, **values | changes)


def test_the_share_of_the_peak_is_six_operations_per_parameter_and_token():
    # 6 x 1e9 x 1e5 = 6e14 operations; two GPUs could do 10 x 2 x 3e14 = 6e15
    assert fields()["mfu"] == pytest.approx(0.1)


def test_a_gpu_of_the_learner_trains_its_part_and_a_gpu_of_the_workers_gives_its_part():
    found = fields()
    assert found["learner_gpu_tokens_per_s"] == 5_000.0  # 100,000 tokens / 10 s / 2 GPUs
    assert found["worker_gpu_tokens_per_s"] == 1_500.0  # 12,000 tokens a second / (4 + 4 + 0) GPUs


def test_workers_without_a_gpu_leave_the_learners_throughput_alone():
    found = fields(groups=["cpu", "cpu"])
    assert found["worker_gpu_tokens_per_s"] is None
    assert found["learner_gpu_tokens_per_s"] == 5_000.0


def test_the_hours_are_of_the_learners_gpus_and_of_those_of_each_worker():
    # 2 + 2 x 4 GPUs for 10 s, after an hour and a half
    before = dataclasses.replace(STEP, gpu_s=5400.0)
    assert fields()["gpu_s"] == pytest.approx(100)
    assert fields(before=before)["gpu_s"] == pytest.approx(5500)


def test_without_a_gpu_there_are_neither_and_without_a_known_peak_no_share():
    found = fields(cost(gpus=0, peak_flops=None, gpus_of_worker={}))
    assert set(found.values()) == {None}
    assert fields(cost(peak_flops=None))["mfu"] is None
    assert fields(cost(peak_flops=None))["gpu_s"] is not None


def test_a_step_that_was_taken_again_after_a_crash_costs_nothing_more():
    before = dataclasses.replace(STEP, gpu_s=5400.0)
    found = fields(before=before, seconds=0.0)
    assert (found["gpu_s"], found["mfu"], found["learner_gpu_tokens_per_s"]) == (5400.0, None, None)


def test_the_gpus_are_those_that_the_spec_asks_for():
    found = StepCost.of(SPEC, parameters=7, gpu_name="NVIDIA H200")
    assert (found.parameters, found.gpus, found.peak_flops) == (7, 2, 989e12)
    assert found.gpus_of_worker == {"wide": 4, "cpu": 0}
    assert StepCost.of(SPEC, parameters=7, gpu_name=None).gpus == 0
