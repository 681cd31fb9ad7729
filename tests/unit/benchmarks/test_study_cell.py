"""The stages of a study's cell are timed apart, and its arithmetic is counted."""

from pathlib import Path

from benchmarks.study_cell import cell_times
from research.cells.cell import Cell
from vcpo.api import VCPORunSpec

TINY = str(Path(__file__).resolve().parents[3] / "examples" / "models" / "tiny")
SPEC = VCPORunSpec.model_validate(
    {
        "model": {"name": "tiny"},
        "environment": {"name": "sort_digits", "parameters": {"digits": 3, "style": "plain"}},
        "steps": 9,
        "batch": {"promptsPerStep": 2, "trajectoriesPerPrompt": 4},
        "sampling": {"maxNewTokens": 5},
        "evaluation": {"everySteps": 4, "prompts": 2},
    }
)


def test_a_step_is_the_sum_of_its_stages_and_longer_than_its_arithmetic():
    cell = Cell(method="vcpo", lag=1, learning_rate=1e-3, seed=0, spec=SPEC, evaluation_seed=0)
    times = cell_times(cell, TINY, steps=1, flops_per_ms=1e12)
    stages = times["sampling_ms"] + times["update_ms"] + times["evaluation_ms"]
    assert abs(times["step_ms"] - stages) <= 0.2  # each is rounded to 0.1
    assert min(times["sampling_ms"], times["update_ms"], times["evaluation_ms"]) > 0.0
    assert times["products_ms"] == 0.0  # at a speed that no machine has
    slow = cell_times(cell, TINY, steps=1, flops_per_ms=1.0)
    # Two forward passes of 8 trajectories at least: 2 operations a parameter and token.
    assert slow["products_ms"] > 2 * 8 * 200_000
