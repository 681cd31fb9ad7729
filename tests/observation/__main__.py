"""`python -m tests.observation`: rules, dashboards and metrics on real runs, seen by a Prometheus.

Four runs: a healthy one, one that collapses, one with vLLM, and one under the operator
(`tests.e2e.cluster`). The last line of the output is one JSON object. The exit status is 1 if a bar
is missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fixtures.observation.panels import all_panels
from tests.fixtures.rules.paces import PACES_S, alerts_at
from tests.observation.findings import (
    alarm,
    empty_panels,
    exposures,
)
from tests.observation.local_runs import ROOT, observed_runs
from tests.observation.rule_files import alerts_with_runbook, defined_alerts, tested_alerts

CLUSTER_LIMIT_S = 900.0
_START_S = 60.0
"""What a control plane takes to start and to end, at most."""


def observe_all(root: Path) -> dict[str, Any]:
    """Make the four runs; what they show together."""
    _say("1 to 3 of 4: a healthy run, one that collapses, one with vLLM (about 5 minutes)")
    with observed_runs(root) as observation:
        local = exposures(observation)
        empty, found = empty_panels(observation), alarm(observation)
    _say("4 of 4: a run under the operator (about 2 minutes)")
    cluster = observed_cluster()
    _say("alerts at a second, a minute and a quarter of an hour a step")
    paces = {f"alerts_at_{pace_s}s": sorted(alerts_at(pace_s, root)) for pace_s in PACES_S}
    everywhere = all_panels()
    empty &= {(uid, number) for uid, number in cluster["panels_without_data"]}
    return {
        "alerts_defined": len(defined_alerts()),
        "alerts_with_runbook": len(alerts_with_runbook()),
        "alerts_tested": len(tested_alerts()),
        **found,
        **paces,
        "collapse_alerted": "VCPORewardCollapsed" in alerts_at(60, root, collapses=True),
        "throttle_reason_visible": found["throttle_reason_visible"]
        and cluster["throttle_reason_visible"],
        "panels": len(everywhere),
        "panels_with_data": len(everywhere - empty),
        "panels_without_data": sorted(empty),
        "undeclared": sorted(
            {name for each in local.values() for name in each.undeclared} | {*cluster["undeclared"]}
        ),
        "missing": sorted(
            {name for each in local.values() for name in each.missing} | {*cluster["missing"]}
        ),
    }


def shortfalls(result: dict[str, Any]) -> list[str]:
    """Bars that a result misses; empty when it passes."""
    to_throttle = result["critical_to_throttle_steps"]
    bars = {
        "every alert must have a runbook": result["alerts_with_runbook"]
        == result["alerts_defined"],
        "every alert must be tested": result["alerts_tested"] == result["alerts_defined"],
        "no alert may fire on a healthy run": not result["alerts_on_healthy"],
        "no alert may fire on a healthy run at any pace": not any(
            result[f"alerts_at_{pace_s}s"] for pace_s in PACES_S
        ),
        "a collapse of the reward alone must alert": result["collapse_alerted"],
        "the effective rate must be one number": result["effective_rate_agrees"],
        "at most 48 panels": result["panels"] <= 48,
        "every panel must have data": not result["panels_without_data"],
        "what is due must fire": set(result["due"]) <= set(result["fired"]),
        "no alert may outlive the run": set(result["fired"]) == set(result["resolved"]),
        "the throttle must follow within 2 steps": to_throttle is not None and to_throttle <= 2,
        "at most 3 steps may use older data": result["steps_trained_after_throttle_on_older"] <= 3,
        "the reason must be visible": result["throttle_reason_visible"],
        "the run must recover": result["recovered"],
        "every sample must be declared": not result["undeclared"],
        "every declared metric must have a sample": not result["missing"],
    }
    return [bar for bar, holds in bars.items() if not holds]


def observed_cluster() -> dict[str, Any]:
    """The result of the run in a cluster; its progress goes to the output.

    Raises:
        subprocess.CalledProcessError: when it misses a bar of its own.
    """
    ran = subprocess.run(
        [sys.executable, "-m", "tests.e2e.cluster", f"--limit-seconds={CLUSTER_LIMIT_S}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=CLUSTER_LIMIT_S + _START_S,
        check=True,
    )
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _main() -> int:
    with tempfile.TemporaryDirectory(prefix="vcpo-observe-") as folder:
        result = observe_all(Path(folder))
    missed = shortfalls(result)
    for bar in missed:
        _say(f"missed: {bar}")
    _say(json.dumps(result))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(_main())
