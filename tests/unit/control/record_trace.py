"""Records the trace that `test_replay` replays: `python -m tests.unit.control.record_trace`.

A run that starves and grows, falls ill and tightens, recovers, loses its signals and ends with more
workers than it needs. Record it anew only when a change of the decisions is intended: its diff
shows what that change does to a run.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.unit.control.plant import Plant, limits
from vcpo.control.decision import decide
from vcpo.control.signals import RunSignals

TRACE = Path(__file__).with_name("trace.json")
BOUNDS = limits(("main", 1, 4), ("spare", 0, 4), scale_down_cooldown_s=10)


def record() -> list[dict[str, Any]]:
    """Signals and decisions of the run, one entry for each poll."""
    plant = Plant(BOUNDS, needed_workers=7.0, poll_s=5.0)
    entries = []
    for poll in range(110):
        plant.relative_ess_ratio = 0.05 if 30 <= poll < 42 else 0.9
        plant.needed_workers = 7.0 if poll < 80 else 2.5
        plant.step += 1
        plant.now_s += plant.poll_s
        seen = None if 60 <= poll < 70 else plant.measure()
        entries.append(entry := _decide(plant, seen))
        plant.workers = entry["replicas"]
    return entries


def _decide(plant: Plant, seen: RunSignals | None) -> dict[str, Any]:
    decision, plant.state = decide(plant.limits, plant.state, seen, plant.now_s)
    return {
        "now_s": plant.now_s,
        "signals": None if seen is None else dataclasses.asdict(seen),
        "lag_limit_steps": decision.lag_limit_steps,
        "replicas": dict(decision.replicas),
        "conditions": [f"{each.type}={each.status}/{each.reason}" for each in decision.conditions],
    }


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(entry) for entry in record())
    TRACE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
