"""The end-to-end run of `make e2e`."""

import json
import re
import subprocess
import sys

import pytest

from tests.e2e.cluster import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the fake kubelet needs Linux's loopback network"
)


STEPS = 200
"""Half of the example's: enough for every decision to be seen."""


@pytest.fixture(scope="module")
def ending():
    """Exit status, output and result of one run."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.e2e.cluster", f"--steps={STEPS}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
        check=False,
    )
    assert ran.stdout, ran.stderr
    return ran, json.loads(ran.stdout.splitlines()[-1])


def test_a_run_comes_to_its_end_in_a_cluster(ending):
    ran, result = ending
    assert ran.returncode == 0, ran.stdout[-8000:]
    assert result["conditions"]["Complete"] == "Succeeded"
    assert result["steps"] == STEPS


def test_workers_are_added_and_removed_as_decided(ending):
    _, result = ending
    assert result["scaled_up"] >= 1
    assert result["scaled_down"] >= 1
    assert result["replicas_seen"]["max"] > result["replicas_seen"]["min"]


def test_admission_tightens_when_ess_is_under_its_floor(ending):
    _, result = ending
    assert result["throttle_events"] >= 1


def test_an_event_says_with_which_ess_a_run_was_throttled(ending):
    _, result = ending
    expected = re.compile(r"the ESS ratio is \d+\.\d% of the on-policy ratio")
    assert any(expected.search(each) for each in result["throttle_reasons"])


def test_the_model_learns(ending):
    _, result = ending
    assert result["accuracy_after"] > result["accuracy_before"]


def test_deleting_the_run_leaves_nothing_behind(ending):
    _, result = ending
    assert (result["left_behind"], result["orphans"]) == ([], 0)
