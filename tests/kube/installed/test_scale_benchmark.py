"""The scale benchmark: what its stopwatch counts, and that it runs."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.operator_scale import Stopwatch, shortfalls
from tests.fakes.kubernetes.store import Event

ROOT = Path(__file__).resolve().parents[3]
FIGURES = {"reconcile_p99_s": 0.5, "rss_mb": 100.0, "idle_writes_per_hour": 0, "changes": 3}


def change(resource, generation, name="run-1"):
    metadata = {"name": name, "generation": generation, "labels": {"vcpo.dev/run": "run-1"}}
    return Event(
        kind="MODIFIED",
        revision=1,
        resource=resource,
        body={"metadata": metadata},
        before={"metadata": {"generation": 1}},
    )


RUNS, STATEFUL_SETS = ("vcpo.dev", "vcporuns"), ("apps", "statefulsets")


def test_one_change_of_a_run_is_timed_once():
    stopwatch = Stopwatch()
    stopwatch.see(change(RUNS, 2))
    stopwatch.see(change(STATEFUL_SETS, 2))
    stopwatch.see(change(STATEFUL_SETS, 2))
    assert len(stopwatch.latencies_s) == 1


def test_a_change_of_the_status_is_not_timed():
    stopwatch = Stopwatch()
    stopwatch.see(change(RUNS, 1))
    stopwatch.see(change(STATEFUL_SETS, 2))
    assert stopwatch.latencies_s == []


def test_figures_within_the_bars_pass():
    assert shortfalls(FIGURES) == []


def test_every_missed_bar_is_reported():
    worse = {"reconcile_p99_s": 1.5, "rss_mb": 300.0, "idle_writes_per_hour": 1, "changes": 0}
    assert len(shortfalls(worse)) == 4


def test_a_few_runs_at_rest_cost_no_write():
    command = [sys.executable, "-m", "benchmarks.operator_scale"]
    sizes = ["--runs=3", "--idle-seconds=1", "--changes=2"]
    ran = subprocess.run([*command, *sizes], capture_output=True, text=True, cwd=ROOT, check=False)
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["idle_writes_per_hour"] == 0
    assert figures["changes"] == 2
