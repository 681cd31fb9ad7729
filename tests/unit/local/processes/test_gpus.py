"""Processes that share a GPU get memory limits that fit; a process alone on its GPU gets none."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.local.processes.gpus import (
    Gpu,
    TooFewGpusError,
    find_gpus,
    parse_gpus,
    plan_gpus,
    usable_gpus,
)
from vcpo.service.lifecycle import GPU_MEMORY_VARIABLE, gpu_memory_ratio

SMI = """\
0, NVIDIA H200, 143771
1, NVIDIA A100-SXM4-80GB, 81920
2, NVIDIA GH200 480GB, [N/A]
"""


def gpus(count):
    return [Gpu(identifier=str(number)) for number in range(count)]


def start_workers(plan, num_workers):
    """What workers get that start one after the other."""
    on_gpus = Counter()
    shares = []
    for _ in range(num_workers):
        share = plan.share_for_next_worker(on_gpus)
        on_gpus[share.gpu] += 1
        shares.append(share)
    return shares


counts = st.integers(min_value=1, max_value=16)


@given(num_gpus=counts, max_workers=counts, data=st.data())
def test_what_runs_on_a_gpu_fits_into_it(num_gpus, max_workers, data):
    plan = plan_gpus(gpus(num_gpus), max_workers=max_workers)
    num_workers = data.draw(st.integers(min_value=0, max_value=max_workers))
    wanted = Counter()
    for share in [plan.learner, *start_workers(plan, num_workers)]:
        wanted[share.gpu] += share.memory_ratio or 1.0
    assert all(ratio <= 1.0 for ratio in wanted.values())


@given(num_gpus=st.integers(min_value=2, max_value=16), max_workers=counts)
def test_with_a_second_gpu_the_learner_has_its_own_and_workers_are_spread(num_gpus, max_workers):
    plan = plan_gpus(gpus(num_gpus), max_workers=max_workers)
    assert (plan.learner.gpu, plan.learner.memory_ratio) == ("0", None)
    per_gpu = Counter(share.gpu for share in start_workers(plan, max_workers))
    assert "0" not in per_gpu
    assert (
        max(per_gpu.values()) - (min(per_gpu.values()) if len(per_gpu) == num_gpus - 1 else 0) <= 1
    )
    if max_workers < num_gpus:
        assert set(per_gpu.values()) == {1}
        assert "share" not in plan.description


@given(num_gpus=counts, max_workers=counts, num_ranks=st.integers(min_value=2, max_value=16))
def test_several_ranks_have_a_gpu_each_that_no_worker_uses(num_gpus, max_workers, num_ranks):
    try:
        plan = plan_gpus(gpus(num_gpus), max_workers=max_workers, num_ranks=num_ranks)
    except TooFewGpusError:
        assert num_ranks + 1 > num_gpus
        return
    ranks = plan.learner.gpu.split(",")
    assert len(ranks) == len(set(ranks)) == num_ranks < num_gpus
    assert plan.learner.memory_ratio is None
    workers = {share.gpu for share in start_workers(plan, max_workers)}
    assert workers
    assert not workers & set(ranks)


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "cure"),
    [
        (1, 2, "set it to 1: learner and workers then share the GPU"),
        (2, 2, "set it to at most 1"),
        (8, 8, "set it to at most 7"),
    ],
)
def test_too_few_gpus_for_the_ranks_are_refused_with_both_numbers(num_gpus, num_ranks, cure):
    expected = (
        f"the learner's {num_ranks} ranks need a GPU each and the rollout workers one more, and"
        f" this machine has {num_gpus}; {cure}"
    )
    with pytest.raises(TooFewGpusError) as refused:
        plan_gpus(gpus(num_gpus), max_workers=1, num_ranks=num_ranks)
    assert str(refused.value) == expected


@given(num_gpus=counts, num_ranks=counts, size=st.integers(min_value=2, max_value=8))
def test_each_worker_of_several_gpus_has_its_own(num_gpus, num_ranks, size):
    try:
        plan = plan_gpus(gpus(num_gpus), max_workers=2, num_ranks=num_ranks, gpus_per_worker=size)
    except TooFewGpusError:
        assert num_ranks + size > num_gpus
        return
    sets = [share.gpu.split(",") for share in plan.workers]
    used = [gpu for one in [plan.learner.gpu.split(","), *sets] for gpu in one]
    assert len(used) == len(set(used))
    assert {len(one) for one in sets} == {size}
    assert len(sets) == (num_gpus - num_ranks) // size


def test_without_a_gpu_any_number_of_ranks_computes_on_the_cpu():
    assert plan_gpus([], max_workers=1, num_ranks=8).learner is None


def test_a_worker_that_is_replaced_gets_the_gpu_that_is_free():
    plan = plan_gpus(gpus(4), max_workers=3)
    assert plan.share_for_next_worker({"1": 1, "3": 1}).gpu == "2"


def test_one_gpu_is_shared_by_all():
    plan = plan_gpus(gpus(1), max_workers=2)
    assert plan.learner.environment == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0",
        "VCPO_GPU_MEMORY_RATIO": "0.6000",
    }
    assert plan.workers[0].memory_ratio == pytest.approx(0.15)
    assert plan.description == (
        "learner on GPU 0, rollout workers on GPU 0: they share its memory, 0.60 for the learner"
        " and 0.15 for each of 2 workers; with a lower maxReplicas each gets more"
    )


def test_gpus_are_read_as_the_driver_prints_them():
    assert parse_gpus(SMI) == [
        Gpu(identifier="0", name="NVIDIA H200", memory_mebibytes=143_771),
        Gpu(identifier="1", name="NVIDIA A100-SXM4-80GB", memory_mebibytes=81_920),
        Gpu(identifier="2", name="NVIDIA GH200 480GB", memory_mebibytes=None),
    ]
    assert parse_gpus("No devices were found\n") == []


@pytest.mark.parametrize(
    ("variable", "identifiers"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        ("", []),
        ("-1", []),
        ("1,-1,0", ["1"]),
        ("GPU-5f, 1", ["GPU-5f", "1"]),
    ],
)
def test_the_users_own_choice_of_gpus_holds(variable, identifiers):
    usable = usable_gpus(variable, parse_gpus(SMI))
    assert [gpu.identifier for gpu in usable] == identifiers


@pytest.mark.parametrize(
    ("script", "identifiers"),
    [
        ("printf '0, NVIDIA H200, 143771\\n'", ["0"]),
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", []),
    ],
    ids=["a GPU", "a driver that does not answer"],
)
def test_the_driver_is_asked(tmp_path, monkeypatch, script, identifiers):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert [gpu.identifier for gpu in find_gpus({})] == identifiers


@pytest.mark.parametrize("given_ratio", ["0", "1.5", "nan", "half", ""])
def test_a_share_that_is_none_is_refused(monkeypatch, given_ratio):
    monkeypatch.setenv(GPU_MEMORY_VARIABLE, given_ratio)
    with pytest.raises(ValueError, match=r"VCPO_GPU_MEMORY_RATIO: must be a share in \(0, 1\]"):
        gpu_memory_ratio()


def test_a_share_is_read_as_it_was_written(monkeypatch):
    monkeypatch.delenv(GPU_MEMORY_VARIABLE, raising=False)
    assert gpu_memory_ratio() is None
    for name, value in plan_gpus(gpus(1), max_workers=1).learner.environment.items():
        monkeypatch.setenv(name, value)
    assert gpu_memory_ratio() == 0.6
