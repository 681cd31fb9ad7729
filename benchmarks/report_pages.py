"""How large the report of a run is, and how long it takes to make.

The runs are made up: every number of a step is noise, which compresses into nothing, and a skipped
step in fifty. Time is CPU seconds of one process, with the reading of the journal and without it.

    python -m benchmarks.report_pages [--steps 100 1000 10000]

The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from vcpo.algo.health.lag_breakdown import LAG_BUCKETS
from vcpo.api import parse_run, run_to_yaml
from vcpo.records.journal import EvaluationRecord, EventRecord, Journal
from vcpo.records.step_record import CHARTS, StepRecord
from vcpo.report import render_report
from vcpo.report.recorded_run import SPEC_FILE, read_run

SPEC = """
metadata: {{name: noise}}
spec:
  model: {{name: models/none}}
  environment: {{name: countdown}}
  steps: {steps}
"""
ENTRIES = tuple(chart.entry for _, chart in CHARTS if chart.entry is not None)
SCALARS = tuple(field for field, chart in CHARTS if chart.entry is None)


def noisy_step(step: int, noise: random.Random) -> StepRecord:
    """Return a step whose numbers are noise."""
    return StepRecord(
        step=step,
        time_unix_s=30.0 * step,
        reward_mean=noise.random(),
        ess_ratio=noise.random(),
        on_policy_ess_ratio=0.9,
        learning_rate_scale=noise.random(),
        learning_rate=1e-6,
        warning_score=noise.random(),
        diagnostics={entry: noise.random() for entry in ENTRIES},
        ess_by_lag={str(lag): noise.random() for lag in LAG_BUCKETS[:5]},
        skipped="no_gradient" if step % 50 == 0 else None,
        lag_mean=12.0 * noise.random(),
        lag_p50=noise.randrange(12),
        lag_max=12,
        step_s=noise.random(),
        idle_s=noise.random(),
        lag_limit_steps=12,
        leased=128 * step,
        in_flight=noise.randrange(256),
        buffered=noise.randrange(256),
        consumed=128 * step,
        dropped={"stale": step, "surplus": 2 * step},
        **{field: noise.random() for field in SCALARS},
    )


def write_run(run_dir: Path, num_steps: int) -> None:
    """Write the spec and the journal of a run of noise."""
    noise = random.Random(0)  # noqa: S311  no secret
    (run_dir / SPEC_FILE).write_text(run_to_yaml(parse_run(SPEC.format(steps=num_steps))))
    journal = Journal(run_dir)
    for step in range(1, num_steps + 1):
        journal.step(noisy_step(step, noise))
    for step in range(0, num_steps + 1, max(1, num_steps // 20)):
        journal.evaluation(
            EvaluationRecord(
                step=step,
                time_unix_s=30.0 * step,
                accuracy=noise.random(),
                num_trajectories=512,
                policy_version_min=step,
                policy_version_max=step,
            )
        )
    for step in range(0, num_steps, 20):
        message = f"step {step}"
        journal.event(
            EventRecord(time_unix_s=step, source="learner", kind="CheckpointSaved", message=message)
        )


def measure(num_steps: int) -> dict[str, float]:
    """Return bytes of the page, and CPU seconds to read the records and to render the page."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        write_run(run_dir, num_steps)
        started_s = time.process_time()
        recorded = read_run(run_dir)
        read_s = time.process_time() - started_s
        page = render_report(recorded)
        render_s = time.process_time() - started_s - read_s
    return {
        "steps": num_steps,
        "page_bytes": len(page.encode()),
        "read_s": round(read_s, 2),
        "render_s": round(render_s, 2),
    }


def main() -> None:
    """Measure each number of steps and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 1000, 10_000])
    measured = [measure(num_steps) for num_steps in parser.parse_args().steps]
    print(json.dumps({"reports": measured}))


if __name__ == "__main__":
    main()
