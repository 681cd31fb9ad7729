"""What a machine lacks is found and named with its cure; drivers are those of NVIDIA's table."""

from __future__ import annotations

import pytest

from vcpo.local.doctor import (
    compiler_finding,
    driver_finding,
    hub_findings,
    user_finding,
)
from vcpo.service.gpu_driver import driver_problem, driver_version

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Jan 1 00:00:00 UTC 2025\n"
DATE, DATE_S = "Thu, 01 Jan 2026 00:00:00 GMT", 1_767_225_600.0


@pytest.mark.parametrize("text", ["570.133.20", "580.95.05"])
def test_the_drivers_version_is_read_from_the_kernel(tmp_path, text):
    file = tmp_path / "version"
    file.write_text(VERSION.format(text))
    assert driver_version(file) == text
    assert driver_version(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("driver", "cuda", "is_well"),
    [
        ("570.133.20", 13, False),
        ("580.95.05", 13, True),
        ("570.133.20", 12, True),
        (None, 13, True),
        ("570.133.20", None, True),
    ],
)
def test_a_driver_that_is_too_old_for_its_cuda_is_named_with_the_one_it_needs(
    driver, cuda, is_well
):
    problem = driver_problem(driver, cuda)
    assert (problem is None) is is_well
    assert problem is None or "570.133.20, and CUDA 13 needs 580 or newer" in problem
    assert driver_finding(driver, cuda).is_well is is_well


@pytest.mark.parametrize(
    ("has_one", "needs_one", "is_well"),
    [(True, True, True), (False, True, False), (False, False, True)],
)
def test_only_a_machine_with_gpus_needs_a_compiler(has_one, needs_one, is_well):
    found = compiler_finding(lambda _: "/usr/bin/cc" if has_one else None, needs_one=needs_one)
    assert found.is_well is is_well


def test_a_user_without_a_name_is_told():
    def nameless():
        raise KeyError

    assert user_finding(lambda: "vcpo").is_well
    assert "USER" in user_finding(nameless).cure


@pytest.mark.parametrize(("off_s", "is_well"), [(0.0, True), (-59.0, True), (61.0, False)])
def test_a_clock_that_is_off_is_told_by_the_hubs_date(off_s, is_well):
    hub, clock = hub_findings(lambda: DATE, DATE_S + off_s)
    assert (hub.is_well, clock.is_well) == (True, is_well)


def test_a_hub_without_a_way_is_told_once():
    def unreachable():
        raise OSError("timed out")

    (hub,) = hub_findings(unreachable, 0.0)
    assert (hub.is_well, hub.found) == (False, "timed out")
