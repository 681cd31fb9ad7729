"""A small study as a user starts it: `python -m research`, resumed, and reported on."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUDY = f"""
apiVersion: vcpo.dev/v1alpha1
kind: VCPOStudy
metadata: {{name: small}}
spec:
  run:
    model: {{name: {ROOT / "examples" / "models" / "tiny"}}}
    environment: {{name: sort_digits, parameters: {{digits: 3, style: plain}}}}
    steps: 4
    batch: {{promptsPerStep: 2, trajectoriesPerPrompt: 4}}
    sampling: {{maxNewTokens: 5}}
    evaluation: {{everySteps: 2, prompts: 8}}
  methods:
    - {{name: vcpo}}
    - {{name: plain, algorithm: {{baseline: groupMean, learningRateRule: none}}}}
  learningRates: [1.0e-4]
  lags: [0, 2]
  seeds: [1]
  tuning: {{seeds: [9]}}
  claims: {{lags: [0, 2], seeds: [1]}}
  subject: vcpo
"""


def research(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    study, output = folder / "study.yaml", folder / "out"
    return subprocess.run(
        [sys.executable, "-m", "research", study, f"--output={output}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_study_is_run_in_part_finished_later_and_reported(tmp_path):
    study, output = tmp_path / "study.yaml", tmp_path / "out"
    study.write_text(STUDY.replace("[0, 2]", "[0]"), encoding="utf-8")
    part = research(tmp_path, "--jobs=2")
    assert (part.returncode, part.stderr) == (0, "")
    assert "small tuning: 2/2 cells" in part.stdout
    study.write_text(STUDY, encoding="utf-8")
    rest = research(tmp_path, "--jobs=2")
    assert {line.split("  ")[1] for line in rest.stdout.splitlines() if " cells  " in line} == {
        "vcpo-k2-lr0.0001-s1",
        "plain-k2-lr0.0001-s1",
    }
    summary = json.loads((output / "results.json").read_text())
    assert summary["command"] == f"python -m research {study} --output {output}"
    rows = summary["studies"]["small"]["by_lag"]
    found = {(row["method"], row["lag"]): row["cells"] for row in rows}
    assert found == {("vcpo", 0): 1, ("vcpo", 2): 1, ("plain", 0): 1, ("plain", 2): 1}
    files = {path.name for path in output.rglob("*") if path.is_file() and path.suffix != ".svg"}
    assert files == {"cells.jsonl.bz2", "results.md", "results.json"}
