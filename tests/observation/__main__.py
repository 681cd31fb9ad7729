"""`python -m tests.observation`: rules, dashboards and metrics on real runs, seen by a Prometheus.

Four runs: a healthy one, one that collapses, one with vLLM, and one under the operator
(`tests.e2e.cluster`). The last line of the output is one JSON object. The exit status is 1 if a bar
is missed.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fixtures.rules.cases import AREAS, cases_of
from tests.fixtures.rules.paces import PACES_S, alerts_at
from tests.observation.findings import local_findings, missed_bars
from tests.observation.local_runs import ROOT, observed_runs
from tools.monitoring.rules import rules

RUNBOOKS = ROOT / "docs" / "runbooks.md"
CLUSTER_LIMIT_S = 900.0
_START_S = 60.0
"""What a control plane takes to start and to end, at most."""


def observe_all(root: Path) -> dict[str, Any]:
    """Make the four runs; what they show together."""
    _say("1 to 3 of 4: a healthy run, one that collapses, one with vLLM (about 5 minutes)")
    with observed_runs(root) as observation:
        local = local_findings(observation)
    _say("4 of 4: a run under the operator (about 2 minutes)")
    cluster = observed_cluster()
    empty = {*local["panels_without_data"]} & {(u, n) for u, n in cluster["panels_without_data"]}
    _say("alerts at a second, a minute and a quarter of an hour a step")
    return {
        **_alerts(),
        **local,
        **{f"alerts_at_{pace_s}s": sorted(alerts_at(pace_s, root)) for pace_s in PACES_S},
        "collapse_alerted": "VCPORewardCollapsed" in alerts_at(60, root, collapses=True),
        "throttle_reason_visible": local["throttle_reason_visible"]
        and cluster["throttle_reason_visible"],
        "panels_with_data": local["panels"] - len(empty),
        "panels_without_data": sorted(empty),
        "undeclared": sorted({*local["undeclared"], *cluster["undeclared"]}),
        "missing": sorted({*local["missing"], *cluster["missing"]}),
    }


def _alerts() -> dict[str, int]:
    """How many alerts are defined, have a runbook, and have cases that promtool judges."""
    defined = {rule.name for rule in rules() if rule.is_alert}
    headings = re.findall(r"^### (\w+)$", RUNBOOKS.read_text(encoding="utf-8"), re.MULTILINE)
    cases = [case for area in AREAS for case in cases_of(area)]
    firing = {case.alert for case in cases if case.fires}
    silent = {case.alert for case in cases if not case.fires}
    return {
        "alerts_defined": len(defined),
        "alerts_with_runbook": len(defined & set(headings)),
        "alerts_tested": len(defined & firing & silent),
    }


def shortfalls(result: dict[str, Any]) -> list[str]:
    """Bars that a result misses; empty when it passes."""
    defined = result["alerts_defined"]
    bars = {
        "every alert must have a runbook": result["alerts_with_runbook"] == defined,
        "every alert must be tested": result["alerts_tested"] == defined,
        "no alert may fire on a healthy run at any pace": not any(
            result[f"alerts_at_{pace_s}s"] for pace_s in PACES_S
        ),
        "a collapse of the reward alone must alert": result["collapse_alerted"],
    }
    return [*(bar for bar, holds in bars.items() if not holds), *missed_bars(result)]


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
